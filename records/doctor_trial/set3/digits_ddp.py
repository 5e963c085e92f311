"""Distributed digit classifier.  torchrun --standalone --nproc-per-node 2 digits_ddp.py"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

GLYPHS = [
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
]


def digits(n, seed):
    g = torch.Generator().manual_seed(seed)
    font = torch.tensor([[int(c) for c in s] for s in GLYPHS], dtype=torch.float32).view(10, 1, 5, 3)
    font = F.interpolate(font, size=(20, 12))
    label = torch.randint(0, 10, (n,), generator=g)
    canvas = torch.zeros(n, 1, 28, 28)
    dy = torch.randint(0, 9, (n,), generator=g).tolist()
    dx = torch.randint(0, 17, (n,), generator=g).tolist()
    for i in range(n):
        canvas[i, :, dy[i]:dy[i] + 20, dx[i]:dx[i] + 12] = font[label[i]]
    return TensorDataset(canvas + 0.5 * torch.randn(canvas.shape, generator=g), label)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 40, 5)
        self.fc1 = nn.Linear(640, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def get_loaders(batch_size):
    train = DataLoader(digits(2560, 0), batch_size=batch_size, shuffle=True, drop_last=True)
    test = DataLoader(digits(400, 1), batch_size=200)
    return train, test


def test_accuracy(net, loader):
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (net(x).argmax(1) == y).sum().item()
            total += len(y)
    net.train()
    return correct / total


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    train, test = get_loaders(batch_size=64)
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for step, (x, y) in enumerate(train):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
        if rank == 0:
            print(f"epoch {epoch} accuracy {test_accuracy(model.module, test):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
