import argparse

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    p = argparse.ArgumentParser(description="Tabular regression with categorical embeddings")
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--lr-step", type=int, default=2, help="decay the learning rate every N epochs")
    p.add_argument("--gamma", type=float, default=0.3)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def make_table(n, seed):
    g = torch.Generator().manual_seed(seed)
    numeric = torch.randn(n, 24, generator=g)
    district = torch.randint(0, 40, (n,), generator=g)
    kind = torch.randint(0, 6, (n,), generator=g)
    effect = torch.randn(40, generator=torch.Generator().manual_seed(99))
    price = numeric[:, :6].sum(1) + 2 * effect[district] + 0.5 * kind + (numeric[:, 6] * numeric[:, 7])
    price = price + 0.2 * torch.randn(n, generator=g)
    return numeric, district, kind, price


class TabularNet(nn.Module):
    def __init__(self, hidden=384):
        super().__init__()
        self.district = nn.Embedding(40, 12)
        self.kind = nn.Embedding(6, 4)
        self.net = nn.Sequential(
            nn.Linear(24 + 16, hidden), nn.ReLU(), nn.LayerNorm(hidden),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.LayerNorm(hidden),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, numeric, district, kind):
        z = torch.cat([numeric, self.district(district), self.kind(kind)], dim=1)
        return self.net(z).squeeze(1)


def train_one_epoch(model, loader, criterion, optimizer, scheduler):
    model.train()
    total, n = 0.0, 0
    for numeric, district, kind, price in loader:
        pred = model(numeric, district, kind)
        loss = criterion(pred, price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(price)
        n += len(price)
    return total / n


@torch.no_grad()
def validate(model, loader):
    model.eval()
    se, n = 0.0, 0
    for numeric, district, kind, price in loader:
        se += ((model(numeric, district, kind) - price) ** 2).sum().item()
        n += len(price)
    return (se / n) ** 0.5


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    train = DataLoader(TensorDataset(*make_table(6000, 1)), batch_size=args.batch_size, shuffle=True)
    val = DataLoader(TensorDataset(*make_table(1500, 2)), batch_size=500)
    model = TabularNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=args.lr_step, gamma=args.gamma)
    criterion = nn.MSELoss()
    for epoch in range(1, args.epochs + 1):
        train_loss = train_one_epoch(model, train, criterion, optimizer, scheduler)
        print(f"epoch {epoch}: train mse {train_loss:.4f}  val rmse {validate(model, val):.4f}")


if __name__ == "__main__":
    main()
