"""Day-ahead electricity load forecast with a GRU."""
from dataclasses import dataclass

import math
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class Config:
    history: int = 72
    hidden: int = 64
    batch_size: int = 64
    epochs: int = 4
    lr: float = 3e-3
    seed: int = 21


class LoadSeries(Dataset):
    """Sliding windows over an hourly series; the target is the load 24 hours ahead."""

    def __init__(self, hours, history, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours, dtype=torch.float32)
        daily = torch.sin(2 * math.pi * t / 24)
        weekly = 0.5 * torch.sin(2 * math.pi * t / 168)
        temp = 0.3 * torch.randn(hours, generator=g).cumsum(0) / 10
        load = daily + weekly + 0.4 * temp.tanh() + 0.05 * torch.randn(hours, generator=g)
        self.features = torch.stack([load, daily, weekly, temp], dim=1)
        self.load = load
        self.history = history

    def __len__(self):
        return len(self.load) - self.history - 24

    def __getitem__(self, i):
        return self.features[i:i + self.history], self.load[i + self.history + 23]


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.rnn = nn.GRU(4, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        _, h = self.rnn(x)
        return self.head(h[-1])


class LogCosh(nn.Module):
    def forward(self, pred, target):
        err = pred - target
        return (err + nn.functional.softplus(-2.0 * err) - math.log(2.0)).mean()


def fit(cfg):
    torch.manual_seed(cfg.seed)
    train = DataLoader(LoadSeries(1500, cfg.history, 0), cfg.batch_size, shuffle=True, drop_last=True)
    model = Forecaster(cfg.hidden)
    loss_fn = LogCosh()
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        model.train()
        total = 0.0
        for x, y in train:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{cfg.epochs} loss {total / len(train):.5f}")
    return model


if __name__ == "__main__":
    fit(Config())
