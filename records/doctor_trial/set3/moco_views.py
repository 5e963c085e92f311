"""Momentum contrast: an online network is trained against the keys of a slowly following target network."""
import copy
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TwoViews(Dataset):
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        low = torch.randn(n, 3, 6, 6, generator=g)
        self.images = F.interpolate(low, size=(32, 32), mode="bicubic", align_corners=False)

    def __len__(self):
        return len(self.images)

    def view(self, x):
        top, left = torch.randint(0, 9, (2,)).tolist()
        x = x[:, top:top + 24, left:left + 24]
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        return x * (0.8 + 0.4 * torch.rand(3, 1, 1)) + 0.1 * torch.randn(3, 24, 24)

    def __getitem__(self, i):
        return self.view(self.images[i]), self.view(self.images[i])


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, o))


class Encoder(nn.Module):
    def __init__(self, c=24, dim=64):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, c, 3, stride=2, padding=1), nn.GroupNorm(4, c), nn.ReLU(),
            nn.Conv2d(c, 2 * c, 3, padding=1), nn.GroupNorm(4, 2 * c), nn.ReLU())
        self.project = mlp(2 * c, 128, dim)

    def forward(self, x):
        return self.project(self.conv(x).mean((2, 3)))


class MomentumContrast(nn.Module):
    def __init__(self, momentum=0.99, temperature=0.2):
        super().__init__()
        self.online = Encoder()
        self.predictor = mlp(64, 128, 64)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.momentum = momentum
        self.temperature = temperature

    def forward(self, a, b):
        qa, qb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ka, kb = self.target(a), self.target(b)
        return self.contrast(qa, kb) + self.contrast(qb, ka)

    def contrast(self, queries, keys):
        scores = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).t() / self.temperature
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    @torch.no_grad()
    def follow(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.mul_(self.momentum).add_(o, alpha=1 - self.momentum)


def main():
    torch.manual_seed(18)
    loader = DataLoader(TwoViews(768), batch_size=32, shuffle=True, drop_last=True)
    model = MomentumContrast()
    trained = list(model.online.parameters()) + list(model.predictor.parameters())
    optimizer = torch.optim.Adam(trained, lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(3):
            model.train()
            total = torch.zeros(())
            for a, b in loader:
                loss = model(a, b)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.follow()
                total += loss.detach()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                        "rng": torch.get_rng_state()}, os.path.join(folder, f"epoch{epoch}.pt"))
            print(f"epoch {epoch} loss {total.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
