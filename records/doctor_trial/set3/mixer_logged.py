"""MLP-Mixer on synthetic scenes with safe restarts and detailed logs."""
import json
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class MixerBlock(nn.Module):
    def __init__(self, tokens, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.token = nn.Sequential(nn.Linear(tokens, 128), nn.GELU(), nn.Linear(128, tokens))
        self.channel = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class Mixer(nn.Module):
    def __init__(self, d=192, depth=4, patch=8, size=32, classes=6):
        super().__init__()
        self.patch = nn.Conv2d(3, d, patch, patch)
        self.blocks = nn.Sequential(*[MixerBlock((size // patch) ** 2, d) for _ in range(depth)])
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


def scenes(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    proto = torch.randn(6, 3, 8, 8, generator=g)
    return TensorDataset(F.interpolate(proto[y], size=(32, 32)) + torch.randn(n, 3, 32, 32, generator=g), y)


class RunLogger:
    def __init__(self, folder):
        self.file = open(os.path.join(folder, "log.jsonl"), "a")
        self.ckpt = os.path.join(folder, "state.pt")

    def log(self, step, loss, model):
        row = {"step": step, "loss": loss.item()}
        for name, p in model.named_parameters():
            row[name] = {"grad": p.grad.norm().item(), "hist": torch.histc(p.detach(), 20).tolist()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def checkpoint(self, step, epoch, model, optimizer):
        state = {"step": step, "epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "rng": torch.get_rng_state()}
        torch.save(state, self.ckpt + ".new")
        os.replace(self.ckpt + ".new", self.ckpt)


def main():
    torch.manual_seed(16)
    loader = DataLoader(scenes(640, 16), batch_size=16, shuffle=True)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    with tempfile.TemporaryDirectory() as folder:
        logger = RunLogger(folder)
        step = 0
        for epoch in range(2):
            model.train()
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                logger.log(step, loss, model)
                logger.checkpoint(step, epoch, model, optimizer)
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        logger.file.close()


if __name__ == "__main__":
    main()
