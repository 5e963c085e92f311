import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser("Impute missing vitals with a denoising convolutional autoencoder")
parser.add_argument("--patients", type=int, default=1200)
parser.add_argument("--steps", type=int, default=96)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=48)
parser.add_argument("--drop", type=float, default=0.2)


def simulate(n, t, seed):
    g = torch.Generator().manual_seed(seed)
    time = torch.linspace(0, 1, t)
    base = 70 + 10 * torch.randn(n, 1, generator=g)
    rhythm = 8 * torch.sin(6.28 * (2 + 3 * torch.rand(n, 1, generator=g)) * time + 6.28 * torch.rand(n, 1, generator=g))
    x = base + rhythm + 2 * torch.randn(n, t, generator=g)
    observed = (torch.rand(n, t, generator=g) > 0.3).float()
    return (x - 70) / 12, observed


class Imputer(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(2, width, 9, padding=4), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=4), nn.ReLU(),
            nn.Conv1d(width, width, 9, padding=8, dilation=2), nn.ReLU())
        self.decode = nn.Conv1d(width, 1, 1)

    def forward(self, values, mask):
        """values (B, T), mask (B, 1, T) -> reconstruction (B, T)"""
        z = torch.cat([values.unsqueeze(1) * mask, mask], dim=1)
        return self.decode(self.encode(z)).squeeze(1)


def masked_mse(pred, target, mask):
    sq = (pred - target) ** 2 * mask
    return sq.sum() / mask.expand_as(sq).sum().clamp(min=1)


def main():
    args = parser.parse_args()
    torch.manual_seed(3)
    values, observed = simulate(args.patients, args.steps, seed=3)
    loader = DataLoader(TensorDataset(values, observed), batch_size=args.batch, shuffle=True, drop_last=True)
    net = Imputer()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for epoch in range(args.epochs):
        net.train()
        running = torch.zeros(())
        for values_b, observed_b in loader:
            observed_b = observed_b.unsqueeze(1)
            visible = observed_b * (torch.rand_like(observed_b) > args.drop)
            loss = masked_mse(net(values_b, visible), values_b, observed_b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            running += loss.detach()
        print(f"epoch {epoch} masked mse {running.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
