"""Regression on wind-turbine records: warmup from zero, full checkpoints, best weights kept aside."""
import copy
import math
import os
import tempfile
from collections import deque

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, WARMUP, PEAK = 4, 128, 15, 3e-3


def turbine(n, seed):
    g = torch.Generator().manual_seed(seed)
    wind = 25 * torch.rand(n, 1, generator=g)
    other = torch.randn(n, 15, generator=g)
    power = 1 / (1 + torch.exp(-(wind - 9) / 1.5)) * (1 + 0.1 * other[:, :1]) + 0.02 * torch.randn(n, 1, generator=g)
    return TensorDataset(torch.cat([(wind - 12.5) / 7, other], dim=1), power)


def make_model(width=384):
    return nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(),
                         nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))


def warmup_cosine(total):
    def factor(step):
        if step < WARMUP:
            return step / WARMUP
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - WARMUP) / (total - WARMUP))))
    return factor


def save(path, state):
    torch.save(state, path + ".part")
    os.replace(path + ".part", path)


@torch.no_grad()
def validation_mae(model, loader):
    model.eval()
    err = n = 0
    for x, y in loader:
        err += (model(x) - y).abs().sum().item()
        n += y.numel()
    model.train()
    return err / n


def main(folder):
    torch.manual_seed(41)
    train = DataLoader(turbine(3900, 1), BATCH, shuffle=True)
    val = DataLoader(turbine(900, 2), 400)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(EPOCHS * len(train)))
    recent = deque(maxlen=20)
    best, best_state, start, step = float("inf"), None, 0, 0
    path = os.path.join(folder, "turbine.pt")
    if os.path.exists(path):
        s = torch.load(path, weights_only=True)
        model.load_state_dict(s["model"])
        optimizer.load_state_dict(s["optimizer"])
        scheduler.load_state_dict(s["scheduler"])
        torch.set_rng_state(s["rng"])
        best, best_state, start, step = s["best"], s["best_state"], s["epoch"], s["step"]
    for epoch in range(start, EPOCHS):
        for x, y in train:
            loss = nn.functional.smooth_l1_loss(model(x), y, beta=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            recent.append(loss.detach())
            step += 1
        mae = validation_mae(model, val)
        if mae < best:
            best, best_state = mae, copy.deepcopy(model.state_dict())
        save(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "epoch": epoch + 1, "step": step, "best": best,
                    "best_state": best_state, "rng": torch.get_rng_state()})
        print(f"epoch {epoch} step {step} recent loss {torch.stack(list(recent)).mean():.5f} mae {mae:.4f}")
    model.load_state_dict(best_state)
    print(f"best mae {validation_mae(model, val):.4f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
