# Fault: (1) ranks that train different models: the head is not in DDP
# Line: 69
# Ideal first line: The ranks' copies of head.weight and head.bias differ after a step: head (line 69) is trained but not wrapped in DDP, so its gradients aren't exchanged.
"""Encoder and classifier head trained together; the encoder is wrapped in DDP.

    torchrun --nproc-per-node 2 linear_probe_ddp.py [STEPS]
"""
import itertools
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300
BATCH = 64
CLASSES = 10


class Blobs(Dataset):
    """Small single-channel pictures: a class template under noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(99)
        self.templates = torch.randn(CLASSES, 1, 16, 16, generator=g)
        g.manual_seed(seed)
        self.y = torch.randint(CLASSES, (n,), generator=g)
        self.noise = torch.randn(n, 1, 16, 16, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.templates[self.y[i]] + 2.0 * self.noise[i], self.y[i]


class Encoder(nn.Module):
    def __init__(self, width=16, dim=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(2 * width * 16, dim),
        )

    def forward(self, x):
        return self.net(x)


def accuracy(encoder, head, loader):
    encoder.eval(), head.eval()
    hit = seen = 0
    with torch.no_grad():
        for x, y in loader:
            hit += (head(encoder(x)).argmax(1) == y).sum().item()
            seen += len(y)
    encoder.train(), head.train()
    return hit / seen


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    encoder = DDP(Encoder())
    head = nn.Linear(64, CLASSES)
    opt = torch.optim.SGD(itertools.chain(encoder.parameters(), head.parameters()), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    train = Blobs(4096, seed=0)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH, sampler=sampler, drop_last=True)
    val = DataLoader(Blobs(512, seed=1), batch_size=256)

    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        running = 0.0
        for x, y in loader:
            opt.zero_grad()
            loss = criterion(head(encoder(x)), y)
            loss.backward()
            opt.step()
            running += loss.item()
            step += 1
            if step >= STEPS:
                break
        epoch += 1
        acc = accuracy(encoder.module, head, val)
        print(f"[rank {rank}] epoch {epoch} step {step} loss {running / len(loader):.3f} val acc {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
