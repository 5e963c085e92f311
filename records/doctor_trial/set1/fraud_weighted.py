# Fault: (3) shapes broadcast in a loss: per-sample weights of shape (B, 1)
# Line: 74
# Ideal first line: Shapes broadcast in the loss (line 74): per-sample losses (128,) times weights (128, 1) give (128, 128), so each record gets every record's weight.
"""Rare-event classifier: each record carries its own weight."""
import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    """Amounts and flags of synthetic transactions, about 4 % of them fraud."""

    def __init__(self, n, seed, fraud_weight):
        rng = np.random.default_rng(seed)
        self.y = (rng.random(n) < 0.04).astype(np.int64)
        self.x = rng.normal(size=(n, 30)).astype(np.float32)
        self.x[self.y == 1, :6] += 0.8
        self.w = np.where(self.y == 1, fraud_weight, 1.0).astype(np.float32)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {
            "x": torch.from_numpy(self.x[i]),
            "y": int(self.y[i]),
            "weight": torch.tensor([self.w[i]]),
        }


class Net(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.fc1 = nn.Linear(30, width)
        self.bn1 = nn.BatchNorm1d(width)
        self.fc2 = nn.Linear(width, width)
        self.bn2 = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        return self.out(x)


def validate(model, loader):
    model.eval()
    tp = fn = fp = 0
    with torch.no_grad():
        for batch in loader:
            pred, y = model(batch["x"]).argmax(1), batch["y"]
            tp += ((pred == 1) & (y == 1)).sum().item()
            fn += ((pred == 0) & (y == 1)).sum().item()
            fp += ((pred == 1) & (y == 0)).sum().item()
    return tp / max(tp + fn, 1), tp / max(tp + fp, 1)


def train(args):
    torch.manual_seed(args.seed)
    train_loader = DataLoader(Records(12_800, 0, args.fraud_weight), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(Records(4_000, 1, args.fraud_weight), batch_size=1000)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    step = 0
    for epoch in range(1000):
        model.train()
        for batch in train_loader:
            logits = model(batch["x"])
            per_record = F.cross_entropy(logits, batch["y"], reduction="none")
            loss = (per_record * batch["weight"]).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step >= args.steps:
                break
        recall, precision = validate(model, val_loader)
        print(f"epoch {epoch} step {step}: loss {loss.item():.3f} recall {recall:.2f} precision {precision:.2f}")
        if step >= args.steps:
            return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--fraud-weight", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
