"""Click-through model trained with large batches that are processed in memory-sized pieces."""
import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIELDS, BUCKETS, DENSE = 12, 500, 8


class WideDeep(nn.Module):
    def __init__(self, dim=16, hidden=256):
        super().__init__()
        offsets = torch.arange(FIELDS) * BUCKETS
        self.register_buffer("offsets", offsets)
        self.wide = nn.Embedding(FIELDS * BUCKETS, 1)
        self.deep = nn.Embedding(FIELDS * BUCKETS, dim)
        nn.init.normal_(self.deep.weight, std=0.05)
        nn.init.zeros_(self.wide.weight)
        self.mlp = nn.Sequential(
            nn.Linear(FIELDS * dim + DENSE, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, cats, dense):
        ids = cats + self.offsets
        deep = self.mlp(torch.cat([self.deep(ids).flatten(1), dense], dim=1))
        return (self.wide(ids).sum(1) + deep).squeeze(1)


def clicks(n, seed):
    g = torch.Generator().manual_seed(seed)
    cats = torch.randint(0, BUCKETS, (n, FIELDS), generator=g)
    dense = torch.randn(n, DENSE, generator=g)
    weight = torch.randn(FIELDS, BUCKETS, generator=torch.Generator().manual_seed(5))
    logit = weight[torch.arange(FIELDS), cats].sum(1) * 0.5 + dense[:, 0] - 1.5
    return TensorDataset(cats, dense, torch.bernoulli(logit.sigmoid(), generator=g))


def train_batch(model, optimizer, criterion, batch, micro_size):
    cats, dense, label = batch
    pieces = list(zip(cats.split(micro_size), dense.split(micro_size), label.split(micro_size)))
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for c, d, y in pieces:
        loss = criterion(model(c, d), y) / len(pieces)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=40000)
    parser.add_argument("--batch-size", type=int, default=1050)
    parser.add_argument("--micro-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()

    torch.manual_seed(2)
    loader = DataLoader(clicks(args.rows, 2), args.batch_size, shuffle=True, drop_last=True)
    model = WideDeep()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(loader):
            value = train_batch(model, optimizer, criterion, batch, args.micro_size)
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} logloss {value:.4f}")


if __name__ == "__main__":
    main()
