"""Predict building energy use from tabular data; large effective batch through gradient accumulation."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", default=64, type=int, help="samples per forward pass")
    parser.add_argument("--global-batch", default=512, type=int, help="samples per optimizer step, over all ranks")
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--rows", default=8192, type=int)
    return parser.parse_args()


def load_table(rows):
    """30 numeric and 2 categorical columns."""
    g = torch.Generator().manual_seed(2024)
    num = torch.randn(rows, 30, generator=g)
    cat = torch.stack([torch.randint(0, 12, (rows,), generator=g), torch.randint(0, 7, (rows,), generator=g)], 1)
    w = torch.randn(30, generator=g) / 5
    season = torch.randn(12, generator=g)
    y = num @ w + season[cat[:, 0]] + 0.5 * torch.relu(num[:, 0] * num[:, 1]) + 0.1 * torch.randn(rows, generator=g)
    return TensorDataset(num, cat, (y - y.mean()) / y.std())


class ResidualMLP(nn.Module):
    def __init__(self, width=256, depth=3):
        super().__init__()
        self.month = nn.Embedding(12, 8)
        self.weekday = nn.Embedding(7, 4)
        self.stem = nn.Linear(30 + 12, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, num, cat):
        h = self.stem(torch.cat([num, self.month(cat[:, 0]), self.weekday(cat[:, 1])], 1))
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).squeeze(-1)


class Engine:
    def __init__(self, args):
        self.args = args
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        if self.world > 1:
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.accum = args.global_batch // args.batch_size
        self.micro_steps = self.accum // self.world

        table = load_table(args.rows)
        self.sampler = DistributedSampler(table, self.world, self.rank, shuffle=True)
        self.loader = DataLoader(table, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        net = ResidualMLP()
        self.model = nn.parallel.DistributedDataParallel(net) if self.world > 1 else net
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    def backward(self, num, cat, y, sync):
        ctx = contextlib.nullcontext() if sync or self.world == 1 else self.model.no_sync()
        with ctx:
            loss = nn.functional.mse_loss(self.model(num, cat), y)
            (loss / self.accum).backward()
        return loss.item()

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        window = []
        for i, batch in enumerate(self.loader):
            last = (i + 1) % self.micro_steps == 0
            window.append(self.backward(*batch, sync=last))
            if last:
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)
        if self.rank == 0:
            print(f"epoch {epoch}: mse {sum(window) / len(window):.4f}")


if __name__ == "__main__":
    args = get_args()
    engine = Engine(args)
    for e in range(args.epochs):
        engine.run_epoch(e)
    if dist.is_initialized():
        dist.destroy_process_group()
