import contextlib
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

config = dict(vocab=256, d_model=96, heads=4, layers=2, block=64, micro_batch=8,
              grad_accum=4, max_iters=60, lr=6e-4, min_lr=6e-5, warmup=6, clip=1.0, seed=1337)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c["vocab"], c["d_model"])
        self.pos = nn.Embedding(c["block"], c["d_model"])
        self.blocks = nn.ModuleList(Block(c["d_model"], c["heads"]) for _ in range(c["layers"]))
        self.ln = nn.LayerNorm(c["d_model"])
        self.out = nn.Linear(c["d_model"], c["vocab"], bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for blk in self.blocks:
            x = blk(x)
        logits = self.out(self.ln(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def corpus(n, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.randint(1, 4, (n,), generator=g)
    return steps.cumsum(0) % vocab


def get_batch(data, c, gen):
    ix = torch.randint(0, len(data) - c["block"] - 1, (c["micro_batch"],), generator=gen)
    x = torch.stack([data[i:i + c["block"]] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + c["block"]] for i in ix])
    return x, y


def lr_at(it, c):
    if it < c["warmup"]:
        return c["lr"] * (it + 1) / c["warmup"]
    ratio = (it - c["warmup"]) / max(1, c["max_iters"] - c["warmup"])
    return c["min_lr"] + 0.5 * (1 + math.cos(math.pi * ratio)) * (c["lr"] - c["min_lr"])


def main(c):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(c["seed"])
    data = corpus(200_000, c["vocab"], c["seed"])
    gen = torch.Generator().manual_seed(c["seed"] + rank)

    model = DDP(CharLM(c))
    opt = torch.optim.AdamW(model.parameters(), lr=c["lr"], betas=(0.9, 0.95), weight_decay=0.1)
    tic = time.time()
    for it in range(c["max_iters"]):
        for group in opt.param_groups:
            group["lr"] = lr_at(it, c)
        opt.zero_grad(set_to_none=True)
        total = 0.0
        for micro in range(c["grad_accum"]):
            sync = micro % c["grad_accum"] == 0
            with contextlib.nullcontext() if sync else model.no_sync():
                x, y = get_batch(data, c, gen)
                loss = model(x, y) / c["grad_accum"]
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), c["clip"])
        opt.step()
        if rank == 0 and it % 10 == 0:
            print(f"iter {it:3d} loss {total.item():.4f} {time.time() - tic:.1f}s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(config)
