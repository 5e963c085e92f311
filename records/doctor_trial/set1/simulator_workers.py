# Fault: (6) workers that draw the same random numbers: the data set's own numpy Generator is copied by fork
# Line: 23
# Ideal first line: The workers of a loader deliver the same samples: both draw from copies of the data set's numpy Generator (line 23), so every batch comes twice.
"""Parameter estimation from simulated runs; the loader's workers simulate.

    torchrun --nproc-per-node 2 simulator_workers.py [--steps 200]
"""
import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Oscillator(Dataset):
    """Damped oscillators with random frequency and damping, simulated on demand."""

    def __init__(self, size, seed, points=100):
        self.size, self.points = size, points
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return self.size

    def simulate(self, omega, damping):
        t = np.linspace(0, 6, self.points)
        clean = np.exp(-damping * t) * np.cos(omega * t)
        return clean + 0.1 * self.rng.normal(size=self.points)

    def __getitem__(self, index):
        omega, damping = self.rng.uniform(1, 6), self.rng.uniform(0.05, 0.8)
        x = torch.from_numpy(self.simulate(omega, damping)).float()
        return x, torch.tensor([omega / 6, damping], dtype=torch.float32)


class Estimator(nn.Module):
    def __init__(self, points=100):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(points, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
        )

    def forward(self, x):
        return self.net(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(Estimator())
    torch.manual_seed(args.seed + rank)  # each rank simulates its own runs
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    loader = DataLoader(
        Oscillator(100_000, seed=args.seed + rank), batch_size=args.batch_size, num_workers=args.workers, drop_last=True
    )
    fixed = Oscillator(512, seed=10_000)
    x_val, y_val = map(torch.stack, zip(*(fixed[i] for i in range(512))))

    model.train()
    for step, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 and rank == 0:
            model.eval()
            with torch.no_grad():
                val = nn.functional.mse_loss(model.module(x_val), y_val).item()
            model.train()
            print(f"step {step} loss {loss.item():.5f} val {val:.5f}", flush=True)
        if step == args.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
