"""Way 10: a device that is busy counts as one that is useful."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from labs.common.timing.busy import Counter, busy_between, work_for
from labs.kit import measure


@dataclass(frozen=True)
class Work:
    """A block of steps, and how many operations (FLOP) it is."""

    block: Callable[[], object]
    flop: float

    def rate(self, device: torch.device) -> float:
        """FLOP/s of one block."""
        return self.flop / measure.time_steps(self.block, 1, device)[0]


def busy_told_as_useful(
    training: Work, product: Work, counter: Counter, seconds: float, device: torch.device
) -> tuple[float, float]:
    """(fooled, honest) share of the device in use while it trains: what a counter calls busy, and FLOP/s over the
    best rate here, that of a product of large matrices just before and just after.
    """
    rates, best = [], [product.rate(device)]
    marks = work_for(counter.memory_s + seconds, lambda: rates.append(training.rate(device)), counter)
    best.append(product.rate(device))
    start = marks[0][0] + counter.memory_s  # before that, the counter still looks back at the product
    return busy_between(marks, start, marks[-1][0]), statistics.median(rates) / statistics.fmean(best)
