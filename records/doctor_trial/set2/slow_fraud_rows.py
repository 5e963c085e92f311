"""Fraud detection on a table that fits in memory: focal loss, small MLP, PR-AUC-like validation."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Transactions(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        w = torch.randn(24, generator=torch.Generator().manual_seed(99))
        self.amount = torch.rand(n, 1, generator=g).pow(3) * 100
        self.features = torch.randn(n, 24, generator=g)
        score = self.features @ w + 0.05 * self.amount[:, 0] + torch.randn(n, generator=g)
        self.fraud = (score > score.quantile(0.95)).float()

    def __len__(self):
        return len(self.fraud)

    def __getitem__(self, i):
        row = torch.cat([torch.log1p(self.amount[i]), self.features[i]])
        return row, self.fraud[i]


def focal(logits, y, gamma=2.0, alpha=0.75):
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    p = torch.exp(-ce)
    return ((alpha * y + (1 - alpha) * (1 - y)) * (1 - p) ** gamma * ce).mean()


train_loader = DataLoader(Transactions(48000, 1), batch_size=800, shuffle=True, drop_last=True)
valid_loader = DataLoader(Transactions(4000, 2), batch_size=4000)
net = nn.Sequential(nn.Linear(25, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

for epoch in range(3):
    net.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        loss = focal(net(x), y)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        for x, y in valid_loader:
            s = net(x)
            top = s.topk(int(y.sum())).indices
            precision = y[top].mean().item()
    print(f"epoch {epoch} loss {loss.item():.4f} precision at k {precision:.3f}")
