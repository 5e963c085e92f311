"""Data-parallel training of a small convnet on synthetic shapes, with hand-written gradient averaging.

torchrun --nproc-per-node 2 train_shapes_dp.py --epochs 3
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_shapes(n, size, gen):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(8, size - 8, (n, 2), generator=gen)
    radius = torch.randint(3, 8, (n,), generator=gen)
    label = torch.randint(0, 4, (n,), generator=gen)
    dy = (yy[None] - centre[:, 0, None, None]).float()
    dx = (xx[None] - centre[:, 1, None, None]).float()
    r = radius[:, None, None].float()
    forms = torch.stack([
        (dy ** 2 + dx ** 2 < r ** 2),
        (dy.abs() < r) & (dx.abs() < r),
        (dy.abs() + dx.abs() < r),
        (dy.abs() < 2) | (dx.abs() < 2),
    ], dim=1).float()
    img = forms[torch.arange(n), label].unsqueeze(1)
    return img + 0.3 * torch.randn(img.shape, generator=gen), label


class ConvNet(nn.Module):
    def __init__(self, width=16, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.head(self.features(x).mean(dim=(2, 3)))


def average_gradients(model, world_size):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad /= world_size


def random_flip(x):
    flip = torch.rand(x.size(0), device=x.device) < 0.5
    x = x.clone()
    x[flip] = x[flip].flip(-1)
    return x


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=7)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    gen = torch.Generator().manual_seed(args.seed)
    images, labels = make_shapes(1280, 32, gen)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        seen, loss_sum = 0, 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(random_flip(x)), y)
            loss.backward()
            average_gradients(model, world_size)
            optimizer.step()
            seen += len(y)
            loss_sum += loss.detach() * len(y)
        if rank == 0:
            print(f"epoch {epoch}: loss {float(loss_sum) / seen:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
