"""Small encoder with precomputed relative-position tables, data parallel.

    torchrun --nproc-per-node 2 slow_longmask_ddp.py
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MAX_LEN, SEQ, DIM, HEADS, LAYERS, VOCAB = 1024, 48, 64, 4, 2, 96


class AliBiAttention(nn.Module):
    """Attention with a linear distance bias; the table is made once for the longest text we accept."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        pos = torch.arange(MAX_LEN)
        slope = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)])
        bias = -(pos[None, :] - pos[:, None]).abs() * slope[:, None, None]
        self.register_buffer("bias", bias)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-1, -2) / math.sqrt(DIM // HEADS) + self.bias[:, :T, :T]
        return self.out((att.softmax(-1) @ v).transpose(1, 2).reshape(B, T, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.att = nn.LayerNorm(DIM), AliBiAttention()
        self.n2 = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.mlp(self.n2(x))


class Tagger(nn.Module):
    def __init__(self, tags=6):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.cls = nn.Linear(DIM, tags)

    def forward(self, ids):
        return self.cls(self.blocks(self.emb(ids)))


def data(n=1280):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (n, SEQ), generator=g)
    prev = torch.roll(ids, 1, dims=1)
    prev[:, 0] = 0
    return TensorDataset(ids, (ids + prev) % 6)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ds = data()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Tagger())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for k, (ids, tag) in enumerate(loader):
            loss = F.cross_entropy(model(ids).flatten(0, 1), tag.flatten())
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if rank == 0 and k % 10 == 0:
                print(f"epoch {epoch} step {k} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
