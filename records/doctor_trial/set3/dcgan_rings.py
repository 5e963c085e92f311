import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def rings(n, seed):
    g = torch.Generator().manual_seed(seed)
    axis = torch.arange(32.0) - 15.5
    r = (axis[:, None] ** 2 + axis[None] ** 2).sqrt()
    radius = 5 + 7 * torch.rand(n, 1, 1, generator=g)
    width = 1 + torch.rand(n, 1, 1, generator=g)
    return TensorDataset((2 * torch.exp(-((r - radius) / width) ** 2) - 1).unsqueeze(1))


class Generator(nn.Module):
    def __init__(self, z=32, c=16):
        super().__init__()
        self.fc = nn.Linear(z, 2 * c * 64)
        self.up = nn.Sequential(
            nn.BatchNorm2d(2 * c), nn.ReLU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1), nn.BatchNorm2d(c), nn.ReLU(),
            nn.ConvTranspose2d(c, 1, 4, 2, 1), nn.Tanh())
        self.c = c

    def forward(self, z):
        return self.up(self.fc(z).view(-1, 2 * self.c, 8, 8))


class Discriminator(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(2 * c * 64, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--z", type=int, default=32)
    args = p.parse_args()
    torch.manual_seed(23)
    loader = DataLoader(rings(1280, 23), args.batch_size, shuffle=True, drop_last=True)
    gen, disc = Generator(args.z), Discriminator()
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-4, betas=(0.5, 0.999))
    fixed = torch.randn(16, args.z)

    for epoch in range(args.epochs):
        gen.train()
        disc.train()
        for step, (real,) in enumerate(loader):
            fake = gen(torch.randn(len(real), args.z))

            disc.requires_grad_(True)
            d_loss = F.softplus(-disc(real)).mean() + F.softplus(disc(fake.detach())).mean()
            opt_d.zero_grad(set_to_none=True)
            d_loss.backward()
            opt_d.step()

            disc.requires_grad_(False)
            g_loss = F.softplus(-disc(fake)).mean()
            opt_g.zero_grad(set_to_none=True)
            g_loss.backward()
            opt_g.step()

            if step % 10 == 0:
                print(f"epoch {epoch} step {step} d {d_loss.item():.3f} g {g_loss.item():.3f}")
        gen.eval()
        with torch.no_grad():
            sample = gen(fixed)
        print(f"epoch {epoch} sample mean {sample.mean():.3f} std {sample.std():.3f}")


if __name__ == "__main__":
    main()
