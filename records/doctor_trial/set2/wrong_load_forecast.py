"""Short-term load forecasting with a GRU and early stopping."""
import math
import os
import tempfile

import numpy as np
import pandas as pd
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

CONTEXT, HORIZON = 48, 6
PATIENCE = 6
MAX_EPOCHS = 11


def write_csv(path, hours=1200):
    rng = np.random.default_rng(3)
    t = np.arange(hours)
    load = 50 + 10 * np.sin(2 * np.pi * t / 24) + 4 * np.sin(2 * np.pi * t / 168) + rng.normal(0, 1.0, hours)
    temp = 12 + 8 * np.sin(2 * np.pi * (t - 6) / 24) + rng.normal(0, 0.8, hours)
    pd.DataFrame({"load": load, "temp": temp, "hour": t % 24}).to_csv(path, index=False)


class Windows(Dataset):
    def __init__(self, frame, mean, std):
        v = torch.tensor(((frame[["load", "temp"]] - mean) / std).values, dtype=torch.float32)
        h = torch.tensor(frame["hour"].values, dtype=torch.float32) * (2 * math.pi / 24)
        self.x = torch.cat([v, torch.sin(h)[:, None], torch.cos(h)[:, None]], 1)
        self.y = v[:, 0]

    def __len__(self):
        return len(self.y) - CONTEXT - HORIZON + 1

    def __getitem__(self, i):
        return self.x[i : i + CONTEXT], self.y[i + CONTEXT : i + CONTEXT + HORIZON]


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.gru = nn.GRU(4, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, HORIZON))

    def forward(self, x):
        out, _ = self.gru(x)
        return self.head(out[:, -1])


class EarlyStopping:
    """Keeps a CPU copy of the weights with the lowest validation loss."""

    def __init__(self, patience):
        self.patience = patience
        self.best = float("inf")
        self.bad = 0
        self.state = None

    def update(self, value, model):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
            self.state = {k: v.detach().cpu() for k, v in model.state_dict().items()}
        else:
            self.bad += 1
        return self.bad >= self.patience


def mse(model, loader):
    model.eval()
    with torch.no_grad():
        sums = [(nn.functional.mse_loss(model(x), y, reduction="sum").item(), y.numel()) for x, y in loader]
    return sum(s for s, _ in sums) / sum(n for _, n in sums)


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "load.csv")
        write_csv(path)
        frame = pd.read_csv(path)
    cut1, cut2 = 700, 950
    mean, std = frame[["load", "temp"]][:cut1].mean(), frame[["load", "temp"]][:cut1].std()
    train = DataLoader(Windows(frame[:cut1], mean, std), batch_size=48, shuffle=True)
    valid = DataLoader(Windows(frame[cut1:cut2], mean, std), batch_size=128)
    test = DataLoader(Windows(frame[cut2:], mean, std), batch_size=128)

    model = Forecaster()
    opt = optim.RMSprop(model.parameters(), lr=4e-3)
    stopper = EarlyStopping(PATIENCE)
    for epoch in range(MAX_EPOCHS):
        model.train()
        for x, y in train:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        v = mse(model, valid)
        print(f"epoch {epoch:2d} train {loss.item():.4f} valid {v:.4f} best {min(v, stopper.best):.4f}")
        if stopper.update(v, model):
            print("early stop")
            break

    model.load_state_dict(stopper.state)
    print(f"restored best: valid {mse(model, valid):.4f} test {mse(model, test):.4f}")


if __name__ == "__main__":
    main()
