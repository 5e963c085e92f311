"""Reference solutions of notebook 04."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    accumulate: int,
    max_norm: float,
) -> int:
    """One step for every `accumulate` batches, in FP16 if the scaler is on, else in BF16; returns the skipped steps.

    https://docs.pytorch.org/docs/2.13/notes/amp_examples.html
    """
    device = next(model.parameters()).device
    dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16
    skipped = 0
    for first in range(0, len(batches), accumulate):
        group = batches[first : first + accumulate]  # the last one may be smaller
        rows = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device.type, dtype):
                loss = loss_fn(model(x), y) * (len(x) / rows)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:  # the step was skipped: a gradient was inf or NaN
            skipped += 1
        else:
            scheduler.step()
    return skipped


def diagnose(log: Sequence[dict]) -> str:
    """What is wrong with an FP16 training, from its log."""
    taken = [row for row in log if not row["skipped"]]
    if any(row["skipped"] and after["scale"] >= row["scale"] for row, after in pairwise(log)):
        return "new scaler every step"  # a scaler that remembers would have halved its scale
    if all(row["skipped"] for row in log[-4:]):
        return "no zero_grad"  # an overflow that never ends
    if any(row["norm"] > 500 for row in taken):
        return "clip before unscale_"  # a norm as large as the scale
    return "fine"
