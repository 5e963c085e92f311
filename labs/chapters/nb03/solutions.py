"""Reference solutions of notebook 03."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def shard(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    """Indices of this rank's samples: the epoch's order, filled up from its own beginning, every n-th from `rank`."""
    generator = torch.Generator().manual_seed(seed + epoch)  # its own: torch's global random state stays as it is
    order = torch.randperm(dataset_size, generator=generator).tolist()
    total = math.ceil(dataset_size / world_size) * world_size
    order += order[: total - dataset_size]
    return order[rank::world_size]


def all_reduce_gradients(model: nn.Module) -> None:
    """Average every gradient over all ranks, in place; a parameter this rank did not use counts as zeros."""
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def accumulate_step(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """One optimizer step with the gradient of all micro-batches together and one synchronisation."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            (loss_fn(ddp(x), y) * len(x) / rows).backward()
    optimizer.step()


def predicted_speedup(
    compute_s: float, gradient_bytes: float, latency_s: float, bytes_per_s: float, ranks: int
) -> float:
    """Samples per second of n ranks relative to one: n batches per compute plus ring all-reduce, without overlap."""
    messages = 2 * (ranks - 1)
    all_reduce_s = messages * (latency_s + gradient_bytes / ranks / bytes_per_s)
    return ranks * compute_s / (compute_s + all_reduce_s)
