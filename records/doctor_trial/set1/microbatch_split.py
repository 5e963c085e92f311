# Fault: (4) accumulation that averages unequal means: split leaves a micro-batch of 1
# Line: 71
# Ideal first line: Accumulation averages unequal means (line 71): the micro-batches hold 33, 33, 33 and 1 samples, and the one sample gets a quarter of the gradient.
"""Regression on spectra; each batch is split into micro-batches that fit in memory."""
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class SpectrumNet(nn.Module):
    def __init__(self, bands=128):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 16, 7, padding=3, stride=2), nn.SiLU(),
            nn.Conv1d(16, 32, 5, padding=2, stride=2), nn.SiLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * bands // 4, 64), nn.SiLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.head(self.features(x.unsqueeze(1)))


def spectra(n, seed, noisy, bands=128):
    """Three peak heights, to be read from a noisy sum of peaks."""
    g = torch.Generator().manual_seed(seed)
    y = torch.rand(n, 3, generator=g)
    t = torch.linspace(0, 1, bands)
    peaks = torch.stack([torch.exp(-(((t - c) / 0.08) ** 2)) for c in (0.3, 0.45, 0.6)])
    x = y @ peaks + 0.3 * torch.randn(n, bands, generator=g)
    if noisy:  # heights of the training set are read off by hand
        y = y + 0.6 * torch.randn(n, 3, generator=g)
    return TensorDataset(x, y)


def evaluate(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += F.mse_loss(model(x), y, reduction="sum").item()
    model.train()
    return math.sqrt(total / (3 * len(loader.dataset)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--accum", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader = DataLoader(spectra(6000, 0, noisy=True), args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(spectra(1000, 1, noisy=False), 500)
    model = SpectrumNet()
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    micro = args.batch_size // args.accum

    step, running = 0, 0.0
    while step < args.steps:
        for x, y in train_loader:
            optimizer.zero_grad()
            chunks = list(zip(x.split(micro), y.split(micro)))
            for xm, ym in chunks:
                loss = F.mse_loss(model(xm), ym) / len(chunks)
                loss.backward()
                running += loss.item()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 100 == 0:
                print(f"{step}/{args.steps} train mse {running / 100:.4f} val rmse {evaluate(model, val_loader):.4f}")
                running = 0.0
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
