"""Physics-informed network for the viscous Burgers equation  u_t + u u_x = nu u_xx."""
import math

import torch
import torch.nn as nn

NU = 0.01 / math.pi


class FCN(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        layers.append(nn.Linear(width, 1))
        self.net = nn.Sequential(*layers)
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)

    def forward(self, t, x):
        return self.net(torch.stack([t, x], dim=-1))


def gradient(y, v):
    return torch.autograd.grad(y, v, grad_outputs=torch.ones_like(y), create_graph=True)[0]


def pde_residual(model, t, x):
    t.requires_grad_(True)
    x.requires_grad_(True)
    u = model(t, x)
    u_t = gradient(u, t)
    u_x = gradient(u, x)
    u_xx = gradient(u_x, x)
    return u_t + u * u_x - NU * u_xx


class PINNTrainer:
    def __init__(self, n_colloc=512, n_data=128, lr=2e-3, seed=4):
        torch.manual_seed(seed)
        self.model = FCN()
        self.n_colloc, self.n_data = n_colloc, n_data
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, gamma=0.998)

    def sample(self):
        t = torch.rand(self.n_colloc)
        x = 2 * torch.rand(self.n_colloc) - 1
        return t, x

    def initial_loss(self):
        x = 2 * torch.rand(self.n_data) - 1
        u = self.model(torch.zeros_like(x), x).squeeze(-1)
        return ((u + torch.sin(math.pi * x)) ** 2).mean()

    def boundary_loss(self):
        t = torch.rand(self.n_data)
        edge = torch.where(torch.rand(self.n_data) < 0.5, -1.0, 1.0)
        return (self.model(t, edge) ** 2).mean()

    def step(self):
        self.opt.zero_grad()
        res = pde_residual(self.model, *self.sample())
        pde = (res ** 2).mean()
        ic, bc = self.initial_loss(), self.boundary_loss()
        loss = pde + 10 * ic + bc
        loss.backward()
        self.opt.step()
        self.sched.step()
        return loss.detach(), pde.detach()

    def fit(self, iterations):
        for i in range(iterations):
            loss, pde = self.step()
            if i % 40 == 0:
                print(f"iter {i:4d} loss {loss.item():.5f} residual {pde.item():.5f}")


if __name__ == "__main__":
    PINNTrainer().fit(200)
