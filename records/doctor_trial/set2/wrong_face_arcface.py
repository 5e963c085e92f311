"""Face-verification embedding net with an ArcFace head.

    torchrun --nproc-per-node 2 wrong_face_arcface.py --epochs 4
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SyntheticFaces(Dataset):
    """Every identity is a smooth random template; shots are noisy, shifted copies."""

    def __init__(self, identities=40, shots=32, size=32, seed=7):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(identities, 3, 8, 8, generator=g)
        self.templates = F.interpolate(base, size=size, mode="bilinear", align_corners=False)
        self.shots = shots
        self.noise = torch.randn(256, 3, size, size, generator=g) * 0.4

    def __len__(self):
        return self.templates.size(0) * self.shots

    def __getitem__(self, i):
        who, shot = divmod(i, self.shots)
        img = torch.roll(self.templates[who], shifts=(shot % 5) - 2, dims=-1)
        return img + self.noise[(i * 31) % 256], who


class Backbone(nn.Module):
    def __init__(self, dim=64):
        super().__init__()

        def block(i, o):
            return nn.Sequential(
                nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(4, o),
                nn.PReLU(o),
            )

        self.body = nn.Sequential(block(3, 16), block(16, 32), block(32, 64))
        self.neck = nn.Linear(64 * 4 * 4, dim)

    def forward(self, x):
        return F.normalize(self.neck(self.body(x).flatten(1)))


class ArcFaceLoss(nn.Module):
    def __init__(self, dim, n_classes, scale=16.0, margin=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_classes, dim))
        nn.init.xavier_uniform_(self.weight)
        self.scale, self.margin = scale, margin
        self.cos_m, self.sin_m = math.cos(margin), math.sin(margin)

    def forward(self, emb, label):
        cos = F.linear(emb, F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        sin = torch.sqrt(1.0 - cos * cos)
        phi = cos * self.cos_m - sin * self.sin_m
        onehot = F.one_hot(label, cos.size(1)).bool()
        return F.cross_entropy(torch.where(onehot, phi, cos) * self.scale, label)


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)

    dataset = SyntheticFaces()
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    model = DDP(Backbone())
    criterion = ArcFaceLoss(64, 40)
    optimizer = torch.optim.SGD(
        [
            {"params": model.parameters(), "weight_decay": 5e-4},
            {"params": criterion.parameters(), "weight_decay": 5e-4},
        ],
        lr=args.lr,
        momentum=0.9,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.1)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for it, (img, who) in enumerate(loader):
            loss = criterion(model(img), who)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and it % 10 == 0:
                print(f"epoch {epoch} it {it:3d} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.4f}")
        scheduler.step()

    if rank == 0:
        torch.save({"backbone": model.module.state_dict(), "head": criterion.state_dict()}, os.devnull)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
