# Fault: slow: workers restarted each epoch, because the loader is rebuilt
# Line: 55
# Ideal first line: The workers are restarted every 8 steps: a new DataLoader is made in each epoch (line 55), so persistent_workers has nothing to keep.
"""Short epochs; the loaders are made by a factory."""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Beats(Dataset):
    def __init__(self, n, seed):
        self.rng_seed, self.n = seed, n
        self.shapes = np.random.default_rng(3).normal(size=(5, 200)).astype(np.float32).cumsum(1)
        self.labels = np.random.default_rng(seed).integers(5, size=n)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        rng = np.random.default_rng((self.rng_seed, i))
        beat = np.roll(self.shapes[self.labels[i]], rng.integers(-20, 20)) + 4 * rng.normal(size=200)
        return torch.from_numpy(beat.astype(np.float32)), int(self.labels[i])


def make_loader(dataset, train):
    return DataLoader(dataset, batch_size=64, shuffle=train, num_workers=2, persistent_workers=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(512, 5)
        )

    def forward(self, x):
        return self.net(x[:, None])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    args = ap.parse_args()
    torch.manual_seed(0)
    train_set, val_set = Beats(512, 0), Beats(256, 1)
    val_loader = make_loader(val_set, train=False)
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    step, t0 = 0, time.time()
    while step < args.steps:
        train_loader = make_loader(train_set, train=True)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        model.eval()
        with torch.no_grad():
            hits = sum((model(x).argmax(1) == y).sum().item() for x, y in val_loader)
        print(f"step {step} loss {loss.item():.3f} val acc {hits / len(val_set):.3f} {step / (time.time() - t0):.1f} it/s", flush=True)


if __name__ == "__main__":
    main()
