import argparse

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


def gestures(n, seed, classes=7):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    t = torch.linspace(0, 6.283, 60)
    a = (y % 3 + 1).float()[:, None]
    b = (y // 3 + 1).float()[:, None]
    phase = torch.rand(n, 1, generator=g) * 0.8
    path = torch.stack([torch.sin(a * t + phase), torch.cos(b * t + phase), torch.sin(a * b * t)], dim=-1)
    return TensorDataset(path + 0.5 * torch.randn(path.shape, generator=g), y)


class GestureNet(nn.Module):
    def __init__(self, hidden=64, classes=7, dropout=0.4):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(3, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.MaxPool1d(2))
        self.lstm = nn.LSTM(32, hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, x):
        z = self.front(x.transpose(1, 2)).transpose(1, 2)
        out, _ = self.lstm(z)
        return self.fc(self.drop(out.mean(1)))


def train_step(model, batch, criterion, optimizer):
    x, y = batch
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item() * len(y), len(y)


def validate(model, loader, criterion):
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            loss += criterion(out, y).item() * len(y)
            correct += (out.argmax(1) == y).sum().item()
            count += len(y)
    return loss / count, 100.0 * correct / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(8)
    train = DataLoader(gestures(1600, 0), args.batch_size, shuffle=True)
    val = DataLoader(gestures(480, 1), 96)
    model = GestureNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, T_max=args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        total, seen = 0.0, 0
        for batch in train:
            l, n = train_step(model, batch, criterion, optimizer)
            total += l
            seen += n
        scheduler.step()
        val_loss, val_acc = validate(model, val, criterion)
        best = max(best, val_acc)
        print(f"epoch {epoch}: train {total / seen:.4f} | val {val_loss:.4f} | acc {val_acc:.1f}% (best {best:.1f}%)")


if __name__ == "__main__":
    main()
