# Fault: slow: a slow loader that reads a whole shard for one row
# Line: 39
# Ideal first line: The training waits for its loader: each sample reads a whole 8 MB .npy file for one row (line 39); open it with mmap_mode='r'.
"""Windows of sensor data that lie in .npy shards on disk."""
import argparse
import pathlib
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROWS, WIDTH = 16_000, 128


def write_shards(folder, shards=4):
    folder.mkdir(exist_ok=True)
    w = np.random.default_rng(0).normal(size=WIDTH)
    for k in range(shards):
        file = folder / f"x{k}.npy"
        rng = np.random.default_rng(k + 1)
        x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
        if not file.exists():
            np.save(file, x)
        np.save(folder / f"y{k}.npy", (x @ w > 0).astype(np.int64))


class ShardedWindows(Dataset):
    def __init__(self, folder, shards):
        self.x_files = [folder / f"x{k}.npy" for k in shards]
        self.labels = np.concatenate([np.load(folder / f"y{k}.npy") for k in shards])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        shard, row = divmod(i, ROWS)
        x = np.load(self.x_files[shard])[row]
        return torch.from_numpy(x.copy()), int(self.labels[i])


def evaluate(model, loader, batches=5):
    model.eval()
    good = seen = 0
    with torch.no_grad():
        for k, (x, y) in enumerate(loader):
            if k == batches:
                break
            good += (model(x).argmax(1) == y).sum().item()
            seen += len(y)
    model.train()
    return good / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(0)
    folder = pathlib.Path(tempfile.gettempdir()) / "npy_shards_16k"
    write_shards(folder)
    loader = DataLoader(ShardedWindows(folder, range(3)), args.batch, shuffle=True, drop_last=True)
    val_loader = DataLoader(ShardedWindows(folder, [3]), args.batch)
    model = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while step < args.steps:
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.3f} val acc {evaluate(model, val_loader):.3f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
