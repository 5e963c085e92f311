"""Loops that accumulate gradients: two that are right but talk too much, and six that fail without a crash.

Each differs from `labs.gradient_accumulation.accumulate` in one place, marked with `<-`. All of them run, and
the loss goes down with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

MicroBatches = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
CLIP_NORM = 0.1
"""Largest norm of a step's gradient where clipping is on. Small, so that every step here is clipped."""


def sync_every(ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss) -> None:
    """Right, but every backward all-reduces: averaging g1, then g1 + g2 with g1 averaged already, is the same sum."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for x, y in micro_batches:  # <- without no_sync()
        (loss(ddp(x), y) * len(x) / rows).backward()
    optimizer.step()


def forward_outside(
    ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss
) -> None:
    """Right, but every backward all-reduces: DDP decides in the forward pass, and that one is outside no_sync()."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        value = loss(ddp(x), y) * len(x) / rows
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():  # <- one line too late
            value.backward()
    optimizer.step()


def loss_not_divided(
    ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss
) -> None:
    """The sum of m means in place of their mean: the learning rate is m times too large."""
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            loss(ddp(x), y).backward()  # <- as for a single batch
    optimizer.step()


def mean_of_means(ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss) -> None:
    """Unequal micro-batches with equal weights: rows of the small ones count too much.

    With tokens in place of rows this was in Hugging Face's Trainer until October 2024:
    https://github.com/huggingface/transformers/pull/34191
    """
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss(ddp(x), y) / len(micro_batches)).backward()  # <- right only if all have equally many rows
    optimizer.step()


def last_in_no_sync(
    ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss
) -> None:
    """No all-reduce ever: n models drift apart, and rank 0's is saved as if it were the result of all."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    with ddp.no_sync():  # <- around the whole loop, so that the last micro-batch is inside too
        for x, y in micro_batches:
            (loss(ddp(x), y) * len(x) / rows).backward()
    optimizer.step()


def zero_grad_inside(
    ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss
) -> None:
    """Only the last micro-batch is left in the gradient, with a weight of 1/m."""
    rows = sum(len(x) for x, _ in micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        optimizer.zero_grad()  # <- forgets what was accumulated
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss(ddp(x), y) * len(x) / rows).backward()
    optimizer.step()


def step_inside(ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss) -> None:
    """m steps, all but the last with this rank's own gradient: too far, and somewhere else on every rank."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss(ddp(x), y) * len(x) / rows).backward()
        optimizer.step()  # <- indented once too often


def clip_inside(ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: MicroBatches, loss: Loss) -> None:
    """The sum so far is cut down after every micro-batch, so that the later ones weigh more."""
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss(ddp(x), y) * len(x) / rows).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), CLIP_NORM)  # <- belongs after the loop
    optimizer.step()


def clipped(gradient: Tensor) -> Tensor:
    """What the one clip at the end makes of the whole batch's gradient."""
    return gradient * torch.clamp(CLIP_NORM / gradient.norm(), max=1.0)
