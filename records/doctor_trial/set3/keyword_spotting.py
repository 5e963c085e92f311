"""Keyword spotting on log-spectrograms. Continues from the last checkpoint in --out when there is one."""
import argparse
import math
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def build_args():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default=None)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--warmup-steps", type=int, default=20)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--batch-size", type=int, default=32)
    return p.parse_args()


def spectrograms(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 8, (n,), generator=g)
    mel = torch.arange(40.0)[None, :, None]
    time = torch.arange(64.0)[None, None, :]
    slope = (y.float() - 3.5)[:, None, None] / 8
    ridge = 20 + slope * (time - 32) + 3 * torch.randn(n, 1, 1, generator=g)
    x = torch.exp(-((mel - ridge) ** 2) / 8) + 0.4 * torch.randn(n, 40, 64, generator=g)
    return x.unsqueeze(1), y


class DSCNN(nn.Module):
    def __init__(self, ch=32, classes=8):
        super().__init__()
        def ds(c):
            return nn.Sequential(
                nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c), nn.ReLU(),
                nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.ReLU())
        self.net = nn.Sequential(
            nn.Conv2d(1, ch, (8, 4), stride=2), nn.BatchNorm2d(ch), nn.ReLU(),
            ds(ch), ds(ch), ds(ch), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ch, classes))

    def forward(self, x):
        return self.net(x)


def save_checkpoint(path, model, optimizer, scheduler, epoch, step):
    tmp = path + ".tmp"
    torch.save({
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch,
        "step": step,
        "torch_rng": torch.get_rng_state(),
    }, tmp)
    os.replace(tmp, path)


def load_checkpoint(path, model, optimizer, scheduler):
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["torch_rng"])
    return state["epoch"] + 1, state["step"]


def main():
    args = build_args()
    out = args.out or tempfile.mkdtemp(prefix="kws_")
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, "last.pt")
    torch.manual_seed(17)
    loader = DataLoader(TensorDataset(*spectrograms(960, 1)), args.batch_size, shuffle=True, drop_last=True)
    model = DSCNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    total = args.epochs * len(loader)

    def schedule(s):
        if s < args.warmup_steps:
            return (s + 1) / args.warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (s - args.warmup_steps) / max(1, total - args.warmup_steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    criterion = nn.CrossEntropyLoss()
    start, step = 0, 0
    if os.path.exists(path):
        start, step = load_checkpoint(path, model, optimizer, scheduler)
        print(f"resuming at epoch {start}")
    for epoch in range(start, args.epochs):
        model.train()
        total_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            total_loss += loss.detach()
        save_checkpoint(path, model, optimizer, scheduler, epoch, step)
        print(f"epoch {epoch} step {step} loss {total_loss.item() / len(loader):.4f} lr {scheduler.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
