"""Beat classification from ECG records stored as files; each worker opens the records once at its start."""
import argparse
import pathlib
import tempfile

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

RECORDS, LENGTH, WINDOW = 24, 60000, 256


def write_records(folder):
    rng = np.random.default_rng(1)
    for r in range(RECORDS):
        t = np.arange(LENGTH) / 250.0
        rate = 1.0 + 0.5 * rng.random()
        sig = np.sin(2 * np.pi * rate * t) ** 15 + 0.2 * np.sin(2 * np.pi * 0.3 * t) + 0.1 * rng.normal(size=LENGTH)
        np.savetxt(folder / f"rec{r:02d}.csv", sig, fmt="%.4f")


class Beats(Dataset):
    def __init__(self, folder, per_record=12):
        self.paths = sorted(folder.glob("*.csv"))
        self.per_record = per_record
        self.signals = None

    def open(self):
        self.signals = [np.loadtxt(p, dtype=np.float32) for p in self.paths]

    def __len__(self):
        return len(self.paths) * self.per_record

    def __getitem__(self, i):
        if self.signals is None:
            self.open()
        sig = self.signals[i // self.per_record]
        start = int(torch.randint(0, LENGTH - WINDOW, ()))
        w = sig[start : start + WINDOW].copy()
        label = int(w[64:192].max() > 0.9)
        return torch.from_numpy(w).unsqueeze(0), label


def open_in_worker(_):
    get_worker_info().dataset.open()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv1d(1, 16, 7, 2, 3), nn.BatchNorm1d(16), nn.ReLU(),
            nn.Conv1d(16, 32, 7, 2, 3), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 32, 7, 2, 3), nn.BatchNorm1d(32), nn.ReLU(),
            nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 2),
        )

    def forward(self, x):
        return self.f(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        folder = pathlib.Path(d)
        write_records(folder)
        loader = DataLoader(Beats(folder), batch_size=32, shuffle=True, num_workers=args.workers,
                            worker_init_fn=open_in_worker)
        net, loss_fn = Net(), nn.CrossEntropyLoss()
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        for epoch in range(args.epochs):
            net.train()
            for x, y in loader:
                opt.zero_grad()
                loss = loss_fn(net(x), y)
                loss.backward()
                opt.step()
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
