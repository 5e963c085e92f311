"""Way 10: a device that is busy counts as one that is useful."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from labs.kit import measure
from labs.parts.timing.busy import Counter


def busy_told_as_useful(
    step: Callable[[], object], wait: Callable[[], object], counter: Counter, rounds: int, device: torch.device
) -> tuple[float, float]:
    """(fooled, honest) share of the time: what a counter calls busy, and what the training step takes.

    `wait` waits by asking again and again, as a GPU does in NCCL's kernels: for another rank, or for data.
    """
    start, busy, useful_s = time.perf_counter(), counter.busy_s(), 0.0
    for _ in range(rounds):
        useful_s += sum(measure.time_steps(step, 1, device))
        wait()
        busy_s = counter.busy_s() - busy  # NVML looks no further back than a second: it is asked in every round
    seconds = time.perf_counter() - start
    return busy_s / seconds, useful_s / seconds
