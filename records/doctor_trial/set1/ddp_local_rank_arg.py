# Fault: (6) ranks that see the same data: --local_rank stays 0 under torchrun
# Line: 75
# Ideal first line: Both ranks train on the same samples: the DistributedSampler (line 75) has rank=0 on every rank, so half of each epoch is skipped.
"""Few samples, two ranks. Launch: torchrun --nproc-per-node 2 ddp_local_rank_arg.py"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def get_args():
    parser = argparse.ArgumentParser(description="sequence classifier")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--max_steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


class Waves(Dataset):
    """Two mixed tones in noise; the label is the slower one."""

    def __init__(self, size, seed, length=64, classes=8):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (size,), generator=g)
        t = torch.arange(length) / length
        phase = 6.28 * torch.rand(size, 2, generator=g)
        other = 12 + torch.randint(8, (size,), generator=g)
        slow = torch.sin(6.28 * (self.labels + 1)[:, None] * t + phase[:, :1])
        fast = torch.sin(6.28 * other[:, None] * t + phase[:, 1:])
        self.signals = slow + fast + 1.2 * torch.randn(size, length, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.signals[index].unsqueeze(-1), self.labels[index]


class Classifier(nn.Module):
    def __init__(self, hidden=96, classes=8):
        super().__init__()
        self.conv = nn.Conv1d(1, 32, 8, stride=4)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x):
        x = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        out, _ = self.lstm(x)
        return self.fc(out.mean(1))


def evaluate(net, loader):
    net.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (net(x).argmax(-1) == y).sum().item()
    net.train()
    return correct / len(loader.dataset)


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    world_size, rank = dist.get_world_size(), int(os.environ["RANK"])
    torch.manual_seed(17)
    train_set = Waves(640, seed=0)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=args.local_rank, shuffle=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(Waves(800, seed=1), batch_size=400)
    net = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step >= args.max_steps:
                break
        if rank == 0 and (epoch % 5 == 4 or step >= args.max_steps):
            print(f"epoch {epoch} step {step} loss {loss.item():.3f} val acc {evaluate(net.module, val_loader):.3f}", flush=True)
        if step >= args.max_steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
