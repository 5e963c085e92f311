# Fault: (4) accumulation that averages unequal means: masked means over very different numbers of objects
# Line: 51
# Ideal first line: Accumulation averages unequal means (line 51): micro-batches hold about 512 and about 4 objects but count the same; divide by the window's total.
"""Dense keypoint offsets; micro-batches come in turn from a crowded and from a sparse source."""
import argparse

import torch
from torch import nn

CELLS = 64


class Scenes:
    """Signals of CELLS cells; a cell that holds an object has an offset to predict."""

    def __init__(self, density, noise, seed):
        self.density, self.noise = density, noise
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n):
        mask = (torch.rand(n, CELLS, generator=self.g) < self.density).float()
        offset = torch.rand(n, CELLS, generator=self.g) * 2 - 1
        blur = torch.randn(n, CELLS, generator=self.g)
        x = torch.stack([mask, mask * offset, 0.1 * torch.randn(n, CELLS, generator=self.g)], 1)
        target = torch.sin(3 * offset) + self.noise * blur
        return {"x": x, "mask": mask, "target": target}


class Head(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(3, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2), nn.GELU(),
            nn.Conv1d(width, 1, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


class Accumulator:
    def __init__(self, model, optimizer, accum):
        self.model, self.optimizer, self.accum = model, optimizer, accum

    def step(self, window):
        self.optimizer.zero_grad()
        total = 0.0
        for b in window:
            err = (self.model(b["x"]) - b["target"]).pow(2)
            loss = (err * b["mask"]).sum() / b["mask"].sum().clamp(min=1) / self.accum
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total


@torch.no_grad()
def per_object_rmse(model, source, n=512):
    model.eval()
    b = source.batch(n)
    clean = (model(b["x"]) - b["target"]).pow(2) * b["mask"]
    model.train()
    return (clean.sum() / b["mask"].sum()).sqrt().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--micro", type=int, default=16)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    torch.manual_seed(3)
    crowded, sparse = Scenes(0.5, 0.05, seed=1), Scenes(0.004, 2.0, seed=2)
    held_out = Scenes(0.5, 0.0, seed=9)
    model = Head()
    trainer = Accumulator(model, torch.optim.Adam(model.parameters(), lr=args.lr), args.accum)
    for step in range(1, args.steps + 1):
        window = [(crowded if k % 2 == 0 else sparse).batch(args.micro) for k in range(args.accum)]
        loss = trainer.step(window)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}, held-out rmse per object {per_object_rmse(model, held_out):.4f}")


if __name__ == "__main__":
    main()
