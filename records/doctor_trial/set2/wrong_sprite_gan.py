"""Conditional GAN for 16x16 sprites, one process per device.

Launch:  torchrun --nproc-per-node 2 wrong_sprite_gan.py
"""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = dict(z_dim=32, n_class=6, batch=32, epochs=5, lr_g=2e-4, lr_d=2e-4, betas=(0.5, 0.999), images=1024)


def make_sprites(n, n_class):
    g = torch.Generator().manual_seed(99)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    label = torch.randint(0, n_class, (n,), generator=g)
    radius = 0.3 + 0.1 * label.float() + 0.05 * torch.randn(n, generator=g)
    centre = 0.2 * torch.randn(n, 2, generator=g)
    d = torch.sqrt((xx[None] - centre[:, :1, None]) ** 2 + (yy[None] - centre[:, 1:, None]) ** 2)
    img = torch.tanh(8 * (radius[:, None, None] - d))
    return TensorDataset(img.unsqueeze(1), label)


class Generator(nn.Module):
    def __init__(self, z_dim, n_class, ch=32):
        super().__init__()
        self.embed = nn.Embedding(n_class, z_dim)
        self.fc = nn.Linear(2 * z_dim, ch * 2 * 16)
        self.net = nn.Sequential(
            nn.BatchNorm2d(ch * 2), nn.ReLU(),
            nn.ConvTranspose2d(ch * 2, ch, 4, 2, 1), nn.BatchNorm2d(ch), nn.ReLU(),
            nn.ConvTranspose2d(ch, 1, 4, 2, 1), nn.Tanh(),
        )

    def forward(self, z, y):
        h = self.fc(torch.cat([z, self.embed(y)], 1))
        return self.net(h.view(z.size(0), -1, 4, 4))


class Discriminator(nn.Module):
    def __init__(self, n_class, ch=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, ch, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.out = nn.Linear(ch * 2 * 16, 1)
        self.proj = nn.Embedding(n_class, ch * 2 * 16)

    def forward(self, x, y):
        h = self.features(x)
        return self.out(h).squeeze(1) + (self.proj(y) * h).sum(1)


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 + rank)
    random.seed(1000 + rank)

    data = make_sprites(cfg["images"], cfg["n_class"])
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=cfg["batch"], sampler=sampler, drop_last=True)

    G = DistributedDataParallel(Generator(cfg["z_dim"], cfg["n_class"]))
    D = DistributedDataParallel(Discriminator(cfg["n_class"]))
    opt_g = torch.optim.Adam(G.parameters(), cfg["lr_g"], cfg["betas"])
    opt_d = torch.optim.Adam(D.parameters(), cfg["lr_d"], cfg["betas"])

    for epoch in range(cfg["epochs"]):
        sampler.set_epoch(epoch)
        for it, (real, y) in enumerate(loader):
            # discriminator
            z = torch.randn(real.size(0), cfg["z_dim"])
            with torch.no_grad():
                fake = G.module(z, y)
            logits = D(torch.cat([real, fake]), torch.cat([y, y]))
            real_score, fake_score = logits.chunk(2)
            loss_d = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
            opt_d.zero_grad()
            loss_d.backward()
            opt_d.step()

            # generator
            D.requires_grad_(False)
            z = torch.randn(real.size(0), cfg["z_dim"])
            y_fake = torch.randint(0, cfg["n_class"], (real.size(0),))
            loss_g = -D.module(G.module(z, y_fake), y_fake).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
            D.requires_grad_(True)

        stats = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(stats)
        if rank == 0:
            d, g = (stats / world).tolist()
            print(f"epoch {epoch} loss_d {d:.3f} loss_g {g:.3f}", flush=True)


if __name__ == "__main__":
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    try:
        train(CONFIG)
    finally:
        dist.destroy_process_group()
