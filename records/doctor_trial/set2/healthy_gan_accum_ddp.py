"""WGAN with two optimizers, alternating freezing and token-exact gradient accumulation under DDP.

    torchrun --nproc-per-node 2 healthy_gan_accum_ddp.py

The critic steps on every micro-batch, the generator on every third one with its gradients accumulated over two
halves of unequal size (the sum over samples is divided by the global number of samples).
"""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z, DIM, BATCH, EPOCHS, N_CRITIC = 8, 32, 48, 5, 3


def mlp(i, o, width=128):
    return nn.Sequential(nn.Linear(i, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2),
                         nn.Linear(width, o))


def target(n=1920):
    g = torch.Generator().manual_seed(12)
    t = torch.rand(n, 1, generator=g) * 6.28
    ring = torch.cat([t.cos(), t.sin()], 1)
    return TensorDataset(ring @ torch.randn(2, DIM, generator=g) + 0.05 * torch.randn(n, DIM, generator=g))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)            # the same initial weights everywhere
    G, D = DDP(mlp(Z, DIM)), DDP(mlp(DIM, 1))
    noise = torch.Generator().manual_seed(1000 + rank)   # but noise of one's own
    opt_g = torch.optim.RMSprop(G.parameters(), lr=5e-4)
    opt_d = torch.optim.RMSprop(D.parameters(), lr=5e-4)
    data = target()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)

    tick = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            tick += 1
            with torch.no_grad():
                fake = G(torch.randn(len(real), Z, generator=noise))
            score = D(torch.cat([real, fake]))
            loss_d = score[len(real):].mean() - score[: len(real)].mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()
            with torch.no_grad():
                for p in D.parameters():
                    p.clamp_(-0.05, 0.05)

            if tick % N_CRITIC:
                continue
            D.requires_grad_(False)
            opt_g.zero_grad()
            sizes = (20, 28) if rank == 0 else (28, 20)
            total = torch.tensor(float(sum(sizes)))
            dist.all_reduce(total)
            for k, n in enumerate(sizes):
                ctx = G.no_sync() if k == 0 else contextlib.nullcontext()
                with ctx:
                    z = torch.randn(n, Z, generator=noise)
                    # DDP averages over ranks, hence the factor world
                    loss_g = -D.module(G(z)).sum() * world / total
                    loss_g.backward()
            opt_g.step()
            D.requires_grad_(True)
        stat = loss_d.detach().clone()
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch} critic {-stat.item() / world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
