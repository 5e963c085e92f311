# Fault: (2) steps without effect: gradients clipped to norm 0
# Line: 72
# Ideal first line: The steps have no effect: clip_grad_norm_ with max_norm 0 (line 72) sets every gradient to zero, so only weight decay moves the parameters.
"""Tabular classifier with a small trainer class and a config."""
import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    max_steps: int = 300
    batch_size: int = 128
    lr: float = 3e-3
    weight_decay: float = 0.01
    grad_clip: float = 0.0  # 0: off
    warmup: int = 20
    eval_every: int = 50


class ResidualMLP(nn.Module):
    def __init__(self, n_in, n_out, width=256, depth=4):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)
        )
        self.head = nn.Linear(width, n_out)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def dataset(n, seed, n_in=40, n_out=5):
    w = torch.randn(n_in, n_out, generator=torch.Generator().manual_seed(7))
    x = torch.randn(n, n_in, generator=torch.Generator().manual_seed(seed))
    y = (x @ w + 2 * (x[:, :1] * x[:, 1:6])).argmax(1)
    return TensorDataset(x, y)


class Trainer:
    def __init__(self, cfg, model, train_set, val_set):
        self.cfg, self.model = cfg, model
        self.train_loader = DataLoader(train_set, cfg.batch_size, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(val_set, 512)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / cfg.warmup))
        self.loss_fn = nn.CrossEntropyLoss()

    def run(self):
        step = 0
        while step < self.cfg.max_steps:
            for x, y in self.train_loader:
                step += 1
                loss = self.training_step(x, y)
                if step % self.cfg.eval_every == 0:
                    print(f"step {step} lr {self.scheduler.get_last_lr()[0]:.1e} loss {loss:.4f} val acc {self.evaluate():.3f}")
                if step >= self.cfg.max_steps:
                    return

    def training_step(self, x, y):
        self.model.train()
        loss = self.loss_fn(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    @torch.inference_mode()
    def evaluate(self):
        self.model.eval()
        hits = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.val_loader)
        return hits / len(self.val_loader.dataset)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=Config.max_steps)
    parser.add_argument("--grad-clip", type=float, default=Config.grad_clip, help="0 turns clipping off")
    opts = parser.parse_args()
    torch.manual_seed(0)
    cfg = Config(max_steps=opts.max_steps, grad_clip=opts.grad_clip)
    Trainer(cfg, ResidualMLP(40, 5), dataset(8192, 1), dataset(1024, 2)).run()
