# Fault: (7) validation with padded samples counted: shards padded to whole batches
# Line: 28
# Ideal first line: Validation counts 512 samples of a set of 330: the sampler pads with repeated samples (line 28) and all of them go into the accuracy.
"""DDP training with a sharded validation set.

    torchrun --nproc-per-node 2 ddp_ordered_eval.py --max-steps 200
"""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


class OrderedShards(Sampler):
    """Every rank gets whole batches, in order, without shuffling."""

    def __init__(self, dataset, batch_size):
        self.n, self.batch_size = len(dataset), batch_size
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.num_samples = math.ceil(self.n / (batch_size * self.world)) * batch_size

    def __iter__(self):
        indices = list(range(self.n))
        indices += indices[: self.num_samples * self.world - self.n]
        return iter(indices[self.rank :: self.world])

    def __len__(self):
        return self.num_samples


def images(n, seed, classes=6):
    means = torch.randn(classes, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) * classes // n  # as read from one folder per class
    spread = 2.0 + 2.5 * (y > 1)[:, None, None, None]
    return TensorDataset(means[y] + spread * torch.randn(n, 3, 12, 12, generator=g), y)


def build_model(classes=6):
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.BatchNorm2d(48), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(48 * 36, classes),
    )


@torch.no_grad()
def validate(model, loader):
    model.eval()
    stats = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        stats[0] += (model(x).argmax(1) == y).sum()
        stats[1] += len(y)
    dist.all_reduce(stats)
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=240)
    ap.add_argument("--batch-size", type=int, default=48)
    ap.add_argument("--eval-every", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(build_model())
    train_set, val_set = images(3000, 0), images(330, 1)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, 128, sampler=OrderedShards(val_set, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    step, epoch = 0, 0
    while step < args.max_steps:
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.eval_every == 0:
                acc = validate(model.module, val_loader)
                if dist.get_rank() == 0:
                    print(f"step {step} loss {loss.item():.3f} val acc {acc:.4f}", flush=True)
            if step >= args.max_steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
