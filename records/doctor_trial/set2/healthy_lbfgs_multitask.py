"""Two-stage training of a physics-informed network with uncertainty-weighted losses.

Stage 1: Adam on mini-batches drawn by a curriculum sampler (easy points first).  Stage 2: L-BFGS with a closure,
full batch.  The learned log-variances belong to the optimizer; the observations' (N,1) shape is kept throughout.
"""
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.manual_seed(0)


class CurriculumSampler(Sampler):
    """Draws without replacement from the easiest share of the points; the share grows with the epoch."""

    def __init__(self, difficulty, epochs):
        self.order, self.epochs, self.epoch = difficulty.argsort(), epochs, 0

    def __len__(self):
        return max(128, int(len(self.order) * min(1.0, (self.epoch + 2) / self.epochs)))

    def __iter__(self):
        share = self.order[: len(self)]
        yield from share[torch.randperm(len(share))].tolist()


class Field(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


class Weighting(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        stacked = torch.stack(losses)
        return (torch.exp(-self.log_var) * stacked + self.log_var).sum()


def truth(x):
    return torch.exp(-math.pi ** 2 * 0.1 * x[:, 1:]) * torch.sin(math.pi * x[:, :1])


def residual(model, x):
    """u_t - 0.1 u_xx, with the graph kept for the outer backward."""
    x = x.clone().requires_grad_(True)
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (d2,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return du[:, 1:] - 0.1 * d2[:, :1]


pts = torch.rand(768, 2)
obs = truth(pts) + 0.02 * torch.randn(768, 1)
wall = torch.cat([torch.randint(0, 2, (128, 1)).float(), torch.rand(128, 1)], 1)
EPOCHS = 10
sampler = CurriculumSampler(pts[:, 1], EPOCHS)
loader = DataLoader(TensorDataset(pts, obs), batch_size=64, sampler=sampler)
model, weighting = Field(), Weighting(3)
adam = torch.optim.Adam([{"params": model.parameters()}, {"params": weighting.parameters(), "lr": 1e-2}], lr=2e-3)


def losses_on(x, y):
    return [
        (model(x) - y).pow(2).mean(),
        residual(model, x).pow(2).mean(),
        model(wall).pow(2).mean(),
    ]


for epoch in range(EPOCHS):
    sampler.epoch = epoch
    for x, y in loader:
        adam.zero_grad()
        parts = losses_on(x, y)
        total = weighting(parts)
        total.backward()
        adam.step()
    print(f"adam epoch {epoch} data {parts[0].item():.2e} pde {parts[1].item():.2e} wall {parts[2].item():.2e}")

weighting.requires_grad_(False)
lbfgs = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")


def closure():
    lbfgs.zero_grad()
    loss = weighting(losses_on(pts, obs))
    loss.backward()
    return loss


for it in range(6):
    value = lbfgs.step(closure)
    with torch.no_grad():
        err = (model(pts) - truth(pts)).pow(2).mean().sqrt()
    print(f"lbfgs {it} objective {value.item():.4f} rmse to the truth {err.item():.4f}")
