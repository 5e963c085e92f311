# Fault: slow: rows fetched one by one from a tensor, behind random_split
# Line: 35
# Ideal first line: Most of a step's time is the loader: rows of an in-memory tensor are fetched and collated one by one (line 35); index a whole batch.
"""Regression on a table that is in memory, split with random_split."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class PriceNet(nn.Module):
    def __init__(self, n_in=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


def table(n=120_000, n_in=16):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, n_in, generator=g)
    y = x[:, 0] * x[:, 1] + x[:, 2:6].abs().sum(1) + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(x, y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch-size", type=int, default=2048)
    args = p.parse_args()
    torch.manual_seed(0)
    train_set, val_set = random_split(table(), [0.9, 0.1])
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size)
    model, loss_fn = PriceNet(), nn.MSELoss()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    for epoch in range(1000):
        model.train()
        for x, y in train_loader:
            opt.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            opt.step()
            step += 1
            if step == args.steps:
                break
        model.eval()
        with torch.no_grad():
            val = sum(loss_fn(model(x), y).item() * len(y) for x, y in val_loader) / len(val_set)
        print(f"epoch {epoch} step {step} train {loss.item():.4f} val {val:.4f}", flush=True)
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
