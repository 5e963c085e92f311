"""Land-cover classifier that tracks a running confusion matrix while it trains."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 8


class PatchNet(nn.Module):
    def __init__(self, bands=6, c=24):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(bands, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.head = nn.Conv2d(c, CLASSES, 1)

    def forward(self, x):
        return self.head(self.conv(x))


def tiles(n, seed, size=32):
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randn(n, CLASSES, 5, 5, generator=g)
    cover = F.interpolate(coarse, size=(size, size), mode="bilinear").argmax(1)
    signature = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(77))
    bands = signature[cover].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 6, size, size, generator=g)
    return TensorDataset(bands, cover)


class Confusion:
    def __init__(self, n):
        self.n = n
        self.reset()

    def reset(self):
        self.table = [[0] * self.n for _ in range(self.n)]

    def update(self, pred, target):
        for p, t in zip(pred.flatten(), target.flatten()):
            self.table[t.item()][p.item()] += 1

    def miou(self):
        scores = []
        for k in range(self.n):
            inter = self.table[k][k]
            union = sum(self.table[k]) + sum(row[k] for row in self.table) - inter
            if union:
                scores.append(inter / union)
        return sum(scores) / len(scores)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.manual_seed(1)
    loader = DataLoader(tiles(320, 1), args.batch_size, shuffle=True)
    model = PatchNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    confusion = Confusion(CLASSES)
    for epoch in range(args.epochs):
        model.train()
        confusion.reset()
        for step, (bands, cover) in enumerate(loader):
            logits = model(bands)
            loss = F.cross_entropy(logits, cover)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            confusion.update(logits.detach().argmax(1), cover)
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} miou {confusion.miou():.3f}")


if __name__ == "__main__":
    main()
