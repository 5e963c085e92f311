import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self, d_in=784, hidden=256, z=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu, self.logvar = nn.Linear(hidden, z), nn.Linear(hidden, z)
        self.dec = nn.Sequential(nn.Linear(z, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                 nn.Linear(hidden, d_in))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    axis = torch.arange(28.0)
    c = 6 + 16 * torch.rand(n, 2, generator=g)
    s = 2 + 4 * torch.rand(n, 1, 1, generator=g)
    d2 = (axis[None, :, None] - c[:, 0, None, None]) ** 2 + (axis[None, None, :] - c[:, 1, None, None]) ** 2
    return torch.exp(-d2 / (2 * s ** 2)).flatten(1)


def elbo_terms(logits, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return rec, kl


class History:
    def __init__(self):
        self.values = {}

    def add(self, **kwargs):
        for key, value in kwargs.items():
            self.values.setdefault(key, []).append(value)

    def mean(self, key, last):
        return torch.stack(self.values[key][-last:]).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--beta", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(6)
    loader = DataLoader(TensorDataset(blobs(4096, 6)), args.batch_size, shuffle=True, drop_last=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    history = History()
    for epoch in range(args.epochs):
        model.train()
        for (x,) in loader:
            logits, mu, logvar = model(x)
            rec, kl = elbo_terms(logits, x, mu, logvar)
            loss = rec + args.beta * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.add(loss=loss.detach(), rec=rec, kl=kl)
        n = len(loader)
        print(f"epoch {epoch}: rec {history.mean('rec', n):.2f} kl {history.mean('kl', n):.2f} "
              f"loss {history.mean('loss', n):.2f}")


if __name__ == "__main__":
    main()
