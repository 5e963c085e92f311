import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class EarlyStopping:
    """Stops when the validation loss has not improved for `patience` epochs and gives back the best weights."""

    def __init__(self, patience=3, min_delta=1e-4):
        self.patience, self.min_delta = patience, min_delta
        self.best = float("inf")
        self.best_epoch = -1
        self.state = None
        self.bad = 0

    def update(self, value, model, epoch):
        if value < self.best - self.min_delta:
            self.best, self.best_epoch, self.bad = value, epoch, 0
            self.state = model.state_dict().copy()
        else:
            self.bad += 1
        return self.bad >= self.patience

    def restore(self, model):
        if self.state is not None:
            model.load_state_dict(self.state)


class Residual(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(p), nn.Linear(2 * d, d))

    def forward(self, x):
        return x + self.f(x)


def build_model(features, d=192, blocks=3, p=0.1):
    return nn.Sequential(nn.Linear(features, d), *[Residual(d, p) for _ in range(blocks)], nn.LayerNorm(d), nn.Linear(d, 2))


def customers(n, features, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].abs() + 0.8 * torch.randn(n, generator=g)
    return TensorDataset(x, (score > 0).long())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    loss, hits, n = 0.0, 0, 0
    for x, y in loader:
        out = model(x)
        loss += nn.functional.cross_entropy(out, y, reduction="sum").item()
        hits += (out.argmax(1) == y).sum().item()
        n += len(y)
    return loss / n, hits / n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--batch-size", type=int, default=128)
    args = ap.parse_args()
    torch.manual_seed(31)
    train_set, val_set, test_set = random_split(customers(4600, 30, 31), [2600, 1000, 1000])
    train = DataLoader(train_set, args.batch_size, shuffle=True)
    val, test = DataLoader(val_set, 500), DataLoader(test_set, 500)
    model = build_model(30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    stopper = EarlyStopping(patience=5)
    for epoch in range(args.epochs):
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss, val_acc = evaluate(model, val)
        print(f"epoch {epoch} val loss {val_loss:.4f} acc {val_acc:.3f}")
        if stopper.update(val_loss, model, epoch):
            break
    stopper.restore(model)
    test_loss, test_acc = evaluate(model, test)
    print(f"best epoch {stopper.best_epoch}: test loss {test_loss:.4f} acc {test_acc:.3f}")


if __name__ == "__main__":
    main()
