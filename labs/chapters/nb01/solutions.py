"""Reference solutions of notebook 01."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labs.kit.measure import differs, estimate


def benchmark(
    step: Callable[[Any], object],
    make_batch: Callable[[], Any],
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Seconds of a typical step: 10 steps of warm-up, then the median of 30, each timed alone."""
    seconds = []
    for _ in range(10 + 30):
        batch = make_batch()
        synchronize()
        start = clock()
        step(batch)
        synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds[10:])


def compare(
    a: Callable[[], object], b: Callable[[], object], seconds_of: Callable[[Callable], float], pairs: int
) -> tuple[list[float], str]:
    """Seconds of b over seconds of a, pair by pair, and what their median's interval allows to say about b."""
    ratios = []
    for i in range(pairs):
        if i % 2 == 0:
            a_s, b_s = seconds_of(a), seconds_of(b)
        else:  # neither of them always runs first
            b_s, a_s = seconds_of(b), seconds_of(a)
        ratios.append(b_s / a_s)
    interval = estimate(ratios)
    if not differs(interval):
        return ratios, "no difference"
    return ratios, "b is slower" if interval.value > 1 else "b is faster"


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
) -> tuple[float, float]:
    """(mean loss, accuracy) over the samples of an epoch. The host runs ahead; it waits once, at the end."""
    total, right = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(y)  # detached: the sum does not keep the graphs of all steps
        right += (output.argmax(1) == y).sum()
    samples = sum(len(y) for _, y in batches)  # lengths are known on the host
    return total.item() / samples, right.item() / samples
