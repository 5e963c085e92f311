# Fault: (5) checkpoints that lack what the training has: the loss's own parameters
# Line: 56
# Ideal first line: The checkpoint (line 56) lacks criterion.prototypes, 2,560 parameters that the optimizer trains; save and load criterion.state_dict().
"""Embedding training with a cosine-margin loss, checkpoints and --resume."""
import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MarginLoss(nn.Module):
    """Cosine softmax with a margin; holds one prototype per identity."""

    def __init__(self, dim, classes, scale=16.0, margin=0.1):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, dim))
        self.scale, self.margin = scale, margin

    def logits(self, z):
        return F.linear(F.normalize(z), F.normalize(self.prototypes))

    def forward(self, z, y):
        cos = self.logits(z)
        cos = cos - self.margin * F.one_hot(y, cos.shape[1])
        return F.cross_entropy(self.scale * cos, y)


class Embedder(nn.Module):
    def __init__(self, n_in=96, dim=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_in, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim))

    def forward(self, x):
        return self.net(x)


def identities(n, seed, classes=40):
    centres = torch.randn(classes, 96, generator=torch.Generator().manual_seed(11))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    return TensorDataset(centres[y] + 1.5 * torch.randn(n, 96, generator=g), y)


def save(path, step, model, criterion, optimizer, scheduler):
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def load(path, model, criterion, optimizer, scheduler):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--total-steps", type=int, default=400)
    ap.add_argument("--save-every", type=int, default=40)
    ap.add_argument("--checkpoint", default=os.path.join(tempfile.gettempdir(), "metric_learning.pt"))
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    model, criterion = Embedder(), MarginLoss(64, 40)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    step = load(args.checkpoint, model, criterion, optimizer, scheduler) if args.resume else 0
    loader = DataLoader(identities(12_800, 1), batch_size=128, shuffle=True, drop_last=True)
    x_val, y_val = identities(1000, 2).tensors
    last = step + args.total_steps
    while step < last:
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % 20 == 1:
                model.eval()
                with torch.no_grad():
                    acc = (criterion.logits(model(x_val)).argmax(1) == y_val).float().mean().item()
                model.train()
                print(f"step {step} loss {loss.item():.3f} val acc {acc:.3f}")
            if step % args.save_every == 0:
                save(args.checkpoint, step, model, criterion, optimizer, scheduler)
            if step >= last:
                break


if __name__ == "__main__":
    main()
