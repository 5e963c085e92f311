# Fault: (8) worker memory that grows: copy-on-write of a list of Python objects
# Line: 26
# Ideal first line: The workers' private memory grows at every batch: touching the 500,000 Python rows of self.samples (line 26) copies their pages; keep them in an array.
"""Picture tower trained from a big index of (file, label, score) rows, read by workers."""
import argparse
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

N_LABELS = 12


def read_index(n):
    rng = np.random.default_rng(0)
    labels = rng.integers(N_LABELS, size=n).tolist()
    scores = rng.random(n).tolist()
    return [(f"shard{i % 997:04d}/{i:09d}.jpg", y, s) for i, (y, s) in enumerate(zip(labels, scores))]


class CaptionIndex(Dataset):
    def __init__(self, n):
        self.samples = read_index(n)
        self.anchors = np.random.default_rng(1).normal(size=(N_LABELS, 3, 24, 24)).astype("float32")

    def __len__(self):
        return len(self.samples)

    def decode(self, path, label):
        """Stands in for reading and decoding the file."""
        rng = np.random.default_rng(zlib.crc32(str(path).encode()))
        return self.anchors[label] + 2 * rng.standard_normal((3, 24, 24), dtype="float32")

    def __getitem__(self, i):
        path, label, score = self.samples[i]
        return torch.from_numpy(self.decode(path, label)), int(label), float(score)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.fc = nn.Linear(32 * 36, N_LABELS)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--rows", type=int, default=500_000)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    torch.manual_seed(0)
    data = CaptionIndex(args.rows)
    loader = DataLoader(data, args.batch, shuffle=True, num_workers=args.workers, persistent_workers=True, drop_last=True)
    model = Tower()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    ce = nn.CrossEntropyLoss(reduction="none")
    start, window = time.time(), []
    for step, (x, y, score) in enumerate(loader, 1):
        logits = model(x)
        loss = (ce(logits, y) * score.float()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        window.append((logits.argmax(1) == y).float().mean().item())
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} acc {sum(window) / len(window):.3f} {step / (time.time() - start):.0f} it/s", flush=True)
            window.clear()
        if step == args.steps:
            break


if __name__ == "__main__":
    main()
