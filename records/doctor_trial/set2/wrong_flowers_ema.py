"""Image classifier with a moving average of the weights for evaluation.

The job is pre-emptible: it writes a checkpoint after every epoch and continues from it when started again.

    torchrun --nproc-per-node 2 wrong_flowers_ema.py --out runs/flowers
"""
import argparse
import copy
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Flowers(Dataset):
    def __init__(self, n, train):
        g = torch.Generator().manual_seed(0)
        self.proto = F.interpolate(torch.randn(10, 3, 5, 5, generator=g), size=40, mode="bilinear")
        self.n, self.train = n, train

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        y = i % 10
        img = self.proto[y]
        if self.train:
            dy, dx = torch.randint(0, 9, (2,)).tolist()
            img = img[:, dy : dy + 32, dx : dx + 32] + 0.8 * torch.randn(3, 32, 32)
        else:
            g = torch.Generator().manual_seed(i)
            img = img[:, 4:36, 4:36] + 0.8 * torch.randn(3, 32, 32, generator=g)
        return img, y


class Net(nn.Sequential):
    def __init__(self, width=16, classes=10):
        layers, cin = [], 3
        for mult in (1, 2, 4):
            layers += [nn.Conv2d(cin, width * mult, 3, 2, 1), nn.GroupNorm(4, width * mult), nn.GELU()]
            cin = width * mult
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, classes))


class EMA:
    def __init__(self, model, decay=0.995):
        self.shadow = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.lerp_(p, 1 - self.decay)


def save(path, model, opt, sched, epoch):
    tmp = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(),
                "scheduler": sched.state_dict(), "epoch": epoch}, tmp)
    tmp.rename(path)


def load(path, model, opt, sched):
    ck = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(ck["model"])
    opt.load_state_dict(ck["optimizer"])
    sched.load_state_dict(ck["scheduler"])
    return ck["epoch"] + 1


@torch.no_grad()
def accuracy(net, loader):
    right = torch.zeros(2)
    for x, y in loader:
        right += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default=None)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=32)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    folder = [args.out or (tempfile.mkdtemp(prefix="flowers_") if rank == 0 else None)]
    dist.broadcast_object_list(folder)
    out = pathlib.Path(folder[0])
    out.mkdir(parents=True, exist_ok=True)
    last = out / "last.pt"

    train_set = Flowers(960, True)
    sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch, sampler=sampler, drop_last=True)
    test_set = torch.utils.data.Subset(Flowers(200, False), range(rank, 200, world))
    test_loader = DataLoader(test_set, 50)

    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(train_loader))
    start = load(last, model, opt, sched) if last.exists() else 0
    ddp = DistributedDataParallel(model)
    ema = EMA(model)

    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in train_loader:
            loss = F.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            ema.update(model)
        acc = accuracy(ema.shadow, test_loader)
        if rank == 0:
            save(last, model, opt, sched, epoch)
            print(f"epoch {epoch} loss {loss.item():.3f} ema accuracy {acc:.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
