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
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


def slow(state, bucket):
    time.sleep(args.exchange)  # within backward: nothing hides it
    return allreduce_hook(None, bucket)


model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
if args.exchange:
    model.register_comm_hook(None, slow)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 16, sampler=sampler)
micro = 0
while True:
    for x, y in loader:
        micro += 1
        last = micro % args.accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y)
            if rank == args.straggler:
                time.sleep(args.late)
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
