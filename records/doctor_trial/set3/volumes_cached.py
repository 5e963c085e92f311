"""Regress the fill level of tanks from 2-D scans that are read from disk and cropped at random."""
import argparse
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def write_scans(folder, n, size, seed):
    rng = np.random.default_rng(seed)
    levels = rng.uniform(0.2, 0.8, size=n).astype(np.float32)
    for i, level in enumerate(levels):
        scan = rng.normal(0, 0.3, size=(size, size)).astype(np.float32)
        scan[int(size * (1 - level)):] += 1.0
        np.save(os.path.join(folder, f"scan_{i:04d}.npy"), scan)
    np.save(os.path.join(folder, "levels.npy"), levels)


class ScanDataset(Dataset):
    def __init__(self, folder, crop):
        self.folder = folder
        self.crop = crop
        self.levels = np.load(os.path.join(folder, "levels.npy"))
        self._cache = {}

    def __len__(self):
        return len(self.levels)

    def _load(self, i, offset):
        key = (i, offset)
        if key not in self._cache:
            scan = np.load(os.path.join(self.folder, f"scan_{i:04d}.npy"))
            scan = (scan - scan.mean()) / scan.std()
            self._cache[key] = scan[:, offset:offset + self.crop]
        return self._cache[key]

    def __getitem__(self, i):
        offset = int(torch.randint(0, 128 - self.crop + 1, (1,)))
        patch = self._load(i, offset)
        return torch.from_numpy(patch).unsqueeze(0), torch.tensor(self.levels[i])


class LevelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU())
        self.fc = nn.Linear(32 * 16, 1)

    def forward(self, x):
        return self.fc(self.conv(x).mean(-1).flatten(1)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--scans", type=int, default=480)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    torch.manual_seed(19)
    with tempfile.TemporaryDirectory() as folder:
        write_scans(folder, args.scans, 128, seed=19)
        loader = DataLoader(ScanDataset(folder, crop=96), args.batch_size, shuffle=True,
                            num_workers=args.workers, persistent_workers=True)
        model = LevelNet()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(args.epochs):
            model.train()
            total, n = 0.0, 0
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(y)
                n += len(y)
            print(f"epoch {epoch} rmse {(total / n) ** 0.5:.4f}")


if __name__ == "__main__":
    main()
