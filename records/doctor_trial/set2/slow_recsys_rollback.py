"""Matrix factorisation with side features (BPR loss); goes back to the last good weights if the loss is not finite."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, DIM = 40000, 12000, 64


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM, sparse=True)
        self.item = nn.Embedding(ITEMS, DIM, sparse=True)
        self.mix = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.1)

    def forward(self, u, i):
        return (self.mix(self.user(u)) * self.item(i)).sum(-1)


def interactions(n=40960):
    g = torch.Generator().manual_seed(6)
    u = torch.randint(0, USERS, (n,), generator=g)
    i = (u * 7 % 200) * 60 + torch.randint(0, 60, (n,), generator=g)
    return u, i


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = TwoTower()
        self.opt_dense = torch.optim.Adam(self.model.mix.parameters(), lr=1e-3)
        self.opt_sparse = torch.optim.SparseAdam(
            [self.model.user.weight, self.model.item.weight], lr=5e-3)
        self.users, self.items = interactions()
        self.good = None

    def remember(self):
        self.good = (
            copy.deepcopy(self.model.state_dict()),
            copy.deepcopy(self.opt_dense.state_dict()),
            copy.deepcopy(self.opt_sparse.state_dict()),
        )

    def roll_back(self):
        model, dense, sparse = self.good
        self.model.load_state_dict(model)
        self.opt_dense.load_state_dict(dense)
        self.opt_sparse.load_state_dict(sparse)

    def step(self, u, pos):
        neg = torch.randint(0, ITEMS, pos.shape)
        loss = F.softplus(self.model(u, neg) - self.model(u, pos)).mean()
        if not torch.isfinite(loss):
            self.roll_back()
            return float("nan")
        self.remember()
        self.opt_dense.zero_grad()
        self.opt_sparse.zero_grad()
        loss.backward()
        self.opt_dense.step()
        self.opt_sparse.step()
        return loss.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            batches = torch.randperm(len(self.users)).split(512)
            total = sum(self.step(self.users[b], self.items[b]) for b in batches)
            print(f"epoch {epoch} bpr {total / len(batches):.4f}")


if __name__ == "__main__":
    Trainer().fit(2)
