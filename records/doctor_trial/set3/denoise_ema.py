import copy
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Patches(Dataset):
    """Smooth random textures; the network sees them with noise of a random strength."""

    def __init__(self, n, size=32, seed=0):
        g = torch.Generator().manual_seed(seed)
        coarse = torch.randn(n, 3, 8, 8, generator=g)
        self.clean = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=False)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.clean[i]


class Denoiser(nn.Module):
    def __init__(self, c=32, depth=4):
        super().__init__()
        body = [nn.Conv2d(4, c, 3, padding=1), nn.SiLU()]
        for _ in range(depth - 2):
            body += [nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(8, c), nn.SiLU()]
        body.append(nn.Conv2d(c, 3, 3, padding=1))
        self.body = nn.Sequential(*body)

    def forward(self, noisy, sigma):
        level = sigma.expand(-1, 1, *noisy.shape[-2:])
        return noisy - self.body(torch.cat([noisy, level], 1))


class ExponentialAverage:
    def __init__(self, model, decay=0.995):
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.module.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)
        for e, b in zip(self.module.buffers(), model.buffers()):
            e.copy_(b)


class Experiment:
    def __init__(self, workdir, batch_size=16, lr=1e-3):
        self.path = os.path.join(workdir, "checkpoint.pt")
        self.train_loader = DataLoader(Patches(480), batch_size, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(Patches(96, seed=1), 32)
        self.model = Denoiser()
        self.ema = ExponentialAverage(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.epoch = 0

    def save(self):
        torch.save({"epoch": self.epoch,
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict()}, self.path)

    def load(self):
        state = torch.load(self.path, weights_only=True)
        self.epoch = state["epoch"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train_epoch(self):
        self.model.train()
        total = torch.zeros(())
        for clean in self.train_loader:
            sigma = 0.05 + 0.5 * torch.rand(len(clean), 1, 1, 1)
            noisy = clean + sigma * torch.randn_like(clean)
            loss = ((self.model(noisy, sigma) - clean) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.ema.update(self.model)
            total += loss.detach()
        return total.item() / len(self.train_loader)

    @torch.no_grad()
    def validate(self):
        g = torch.Generator().manual_seed(123)
        err, n = 0.0, 0
        for clean in self.val_loader:
            sigma = torch.full((len(clean), 1, 1, 1), 0.25)
            noisy = clean + sigma * torch.randn(clean.shape, generator=g)
            err += ((self.ema.module(noisy, sigma) - clean) ** 2).sum().item()
            n += clean.numel()
        return err / n

    def run(self, epochs):
        if os.path.exists(self.path):
            self.load()
        while self.epoch < epochs:
            train_loss = self.train_epoch()
            self.epoch += 1
            self.save()
            print(f"epoch {self.epoch} train {train_loss:.4f} val(ema) {self.validate():.4f}")


if __name__ == "__main__":
    torch.manual_seed(9)
    with tempfile.TemporaryDirectory() as workdir:
        Experiment(workdir).run(epochs=3)
