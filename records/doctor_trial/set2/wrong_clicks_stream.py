"""Click-through-rate model (factorisation machine + MLP) on a stream of shard files.

    torchrun --nproc-per-node 2 wrong_clicks_stream.py
"""
import argparse
import os
import shutil
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FIELDS = [500, 300, 50, 24, 7]


def write_shards(folder, shards=8, rows=1024):
    rng = np.random.default_rng(17)
    taste = [rng.normal(0, 1, n) for n in FIELDS]
    for s in range(shards):
        ids = np.stack([rng.integers(0, n, rows) for n in FIELDS], 1)
        logit = sum(t[ids[:, k]] for k, t in enumerate(taste)) + taste[0][ids[:, 0]] * taste[1][ids[:, 1]] - 1
        click = rng.random(rows) < 1 / (1 + np.exp(-logit))
        np.savez(os.path.join(folder, f"part-{s:05d}.npz"), ids=ids, click=click)


class ClickStream(IterableDataset):
    def __init__(self, folder, batch_size, seed=0):
        self.files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".npz"))
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        files = [self.files[k] for k in rng.permutation(len(self.files))]
        info = get_worker_info()
        if info is not None:
            files = files[info.id :: info.num_workers]
        for path in files:
            with np.load(path) as part:
                ids, click = part["ids"], part["click"]
            order = rng.permutation(len(ids))
            for k in range(0, len(order) - self.batch_size + 1, self.batch_size):
                pick = order[k : k + self.batch_size]
                yield torch.from_numpy(ids[pick]), torch.from_numpy(click[pick]).float()


class DeepFM(nn.Module):
    def __init__(self, dim=16, hidden=128):
        super().__init__()
        self.offset = np.concatenate([[0], np.cumsum(FIELDS)[:-1]])
        self.register_buffer("shift", torch.tensor(self.offset))
        self.linear = nn.Embedding(sum(FIELDS), 1)
        self.factors = nn.Embedding(sum(FIELDS), dim)
        nn.init.normal_(self.factors.weight, std=0.05)
        nn.init.zeros_(self.linear.weight)
        self.mlp = nn.Sequential(
            nn.Linear(dim * len(FIELDS), hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, ids):
        ids = ids + self.shift
        v = self.factors(ids)
        pair = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(1)
        return self.linear(ids).sum((1, 2)) + pair + self.mlp(v.flatten(1)).squeeze(1)


def run(args):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    box = [tempfile.mkdtemp(prefix="clicks_") if rank == 0 else None]
    dist.broadcast_object_list(box)
    if rank == 0:
        write_shards(box[0])
    dist.barrier()

    stream = ClickStream(box[0], args.batch_size, args.seed)
    loader = DataLoader(stream, batch_size=None, num_workers=1)
    model = DDP(DeepFM())
    opt = torch.optim.Adagrad(model.parameters(), lr=args.lr)
    loss_fn = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        stream.set_epoch(epoch)
        total = torch.zeros(2)
        for ids, click in loader:
            opt.zero_grad()
            loss = loss_fn(model(ids), click)
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(click), len(click)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: logloss {total[0] / total[1]:.4f} over {int(total[1])} rows")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run(args)
    dist.destroy_process_group()
