"""Convolutional VAE on textures, data parallel.

    torchrun --nproc-per-node 2 wrong_texture_vae.py --steps 240
"""
import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Textures(Dataset):
    def __init__(self, n=1024, size=64):
        g = torch.Generator().manual_seed(4)
        coarse = torch.rand(n, 1, 8, 8, generator=g)
        self.img = F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return self.img[i]


class VAE(nn.Module):
    def __init__(self, latent=16, c=8):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, c, 4, 2, 1), nn.SiLU(), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(2 * c, 4 * c, 4, 2, 1), nn.SiLU(), nn.Flatten(),
        )
        self.stats = nn.Linear(4 * c * 64, 2 * latent)
        self.expand = nn.Linear(latent, 4 * c * 64)
        self.dec = nn.Sequential(
            nn.Unflatten(1, (4 * c, 8, 8)), nn.SiLU(),
            nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.SiLU(),
            nn.ConvTranspose2d(c, 1, 4, 2, 1), nn.Sigmoid(),
        )

    def forward(self, x):
        mu, logvar = self.stats(self.enc(x)).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(self.expand(z)), mu, logvar


class Meter:
    """Smoothed and total value of a named statistic."""

    def __init__(self, momentum=0.98):
        self.momentum, self.value, self.sum, self.n = momentum, None, 0.0, 0

    def update(self, v):
        self.value = v if self.value is None else self.momentum * self.value + (1 - self.momentum) * v
        self.sum, self.n = self.sum + v, self.n + 1

    def __str__(self):
        return f"{float(self.value):.4f} (mean {float(self.sum) / self.n:.4f})"


def forever(loader, sampler):
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=160)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--beta", type=float, default=0.1)
    opt = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())

    data = Textures()
    sampler = DistributedSampler(data)
    batches = forever(DataLoader(data, opt.batch, sampler=sampler, drop_last=True), sampler)
    model = DDP(VAE())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    meters = {k: Meter() for k in ("elbo", "kl", "mae", "grad")}

    for step in range(1, opt.steps + 1):
        x = next(batches)
        recon, mu, logvar = model(x)
        rec = F.binary_cross_entropy(recon, x, reduction="sum") / len(x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = rec + opt.beta * kl
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        optimizer.step()

        meters["elbo"].update(loss.item())
        meters["kl"].update(kl.item())
        meters["mae"].update((recon - x).abs().mean())
        meters["grad"].update(norm.item())
        if step % 40 == 0 and dist.get_rank() == 0:
            print(f"step {step} " + " ".join(f"{k} {m}" for k, m in meters.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
