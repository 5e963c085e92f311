"""Linear-probe style transfer: a fixed trunk, a trained head."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Trunk(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.seq = nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU())

    def forward(self, x):
        z = self.seq(x)
        return torch.cat([z.mean((2, 3)), z.amax((2, 3))], dim=1)


class Probe(nn.Module):
    """The trunk is a feature extractor only: it stays in eval mode and gets no gradients."""

    def __init__(self, trunk, features, classes):
        super().__init__()
        self.trunk = trunk.requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, 256), nn.ReLU(), nn.Dropout(0.2),
                                  nn.Linear(256, classes))
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            z = self.trunk(x)
        return self.head(z)


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 7, (n,), generator=g)
    proto = torch.randn(7, 3, 6, 6, generator=torch.Generator().manual_seed(70))
    x = F.interpolate(proto[y], size=(32, 32), mode="bilinear", align_corners=False)
    return TensorDataset(x + 0.8 * torch.randn(n, 3, 32, 32, generator=g), y)


def evaluate(model, loader):
    was_training = model.training
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    model.train(was_training)
    return correct / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.manual_seed(25)
    train = DataLoader(images(1280, 1), batch_size=40, shuffle=True)
    val = DataLoader(images(330, 2), batch_size=64)
    model = Probe(Trunk(), features=128, classes=7)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    for epoch in range(args.epochs):
        loss_sum, n = 0.0, 0
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(y)
            n += len(y)
        print(f"epoch {epoch} loss {loss_sum / n:.4f} val acc {evaluate(model, val):.3f}")


if __name__ == "__main__":
    main()
