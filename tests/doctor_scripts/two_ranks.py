"""A small DDP training: torchrun --nproc-per-node 2 two_ranks.py --straggler 1 --exchange 0.01"""

import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--straggler", type=int, default=-1, help="rank that computes for --late seconds more")
parser.add_argument("--late", type=float, default=0.01)
parser.add_argument("--exchange", type=float, default=0.0, help="seconds that an exchange takes longer, at least")
parser.add_argument("--wide", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--search", action="store_true", help="find_unused_parameters")
parser.add_argument("--unused", type=int, default=-1, help="rank that does not use a part of the model")
parser.add_argument("--no-sync", action="store_true", help="never exchange")
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--times", help="file for the time of each step")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = (
            nn.Linear(64, args.wide),
            nn.Linear(args.wide, args.wide),
            nn.Linear(args.wide, 10),
        )

    def forward(self, x):
        x = torch.relu(self.first(x))
        if rank != args.unused:
            x = x + self.extra(x)
        return self.last(x)


def slow(state, bucket):
    time.sleep(args.exchange)  # within backward: nothing hides it
    return allreduce_hook(None, bucket)


model = DistributedDataParallel(Model(), find_unused_parameters=args.search)
if args.exchange:
    model.register_comm_hook(None, slow)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 16, sampler=sampler)
step = micro = 0
begun = time.perf_counter()
times = []
while step < args.steps:
    for x, y in loader:
        micro += 1
        last = micro % args.accumulate == 0
        with contextlib.nullcontext() if last and not args.no_sync else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y)
            if rank == args.straggler:
                time.sleep(args.late)
            loss.backward()
        if not last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        times.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        if step == args.steps:
            break
if args.times and rank == 0:
    with open(args.times, "w") as file:
        file.write("\n".join(map(str, times)))
dist.destroy_process_group()
