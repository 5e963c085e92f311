"""Reference solutions of notebook 03."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def shard(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    """Indices of this rank's samples: the epoch's order, filled up from its own beginning, every n-th from `rank`."""
    generator = torch.Generator().manual_seed(seed + epoch)  # its own: torch's global random state stays as it is
    order = torch.randperm(dataset_size, generator=generator).tolist()
    total = math.ceil(dataset_size / world_size) * world_size
    order = list(islice(cycle(order), total))  # once around is not enough if there are few samples and many ranks
    return order[rank::world_size]


def accumulate_step(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """One optimizer step with the mean gradient of all rows of all ranks, though ranks have unequally many."""
    rows = torch.tensor(sum(len(x) for x, _ in micro_batches), device=micro_batches[0][0].device)
    dist.all_reduce(rows)  # of all ranks together: a few bytes
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            # DDP divides the sum over ranks by their number, which is taken back here.
            (loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / rows.item()).backward()
    optimizer.step()


def train(model: nn.Module, train_set: Dataset, test_set: Dataset, epochs: int, path: str) -> float:
    """What every rank runs under torchrun: train, save, test. The share of right answers on the whole test set."""
    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from torchrun
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()  # the others read the file next
    model.load_state_dict(torch.load(path, weights_only=True))
    right = rows = 0
    for i in range(rank, len(test_set), ranks):
        x, y = test_set[i]
        right += int(model(x).argmax() == y)
        rows += 1
    counts = torch.tensor([right, rows])
    dist.all_reduce(counts)  # sums: the mean of the ranks' shares would be wrong, they differ in size
    dist.destroy_process_group()
    return (counts[0] / counts[1]).item()
