"""Way 2: the first steps count."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labs.kit import measure

Step = Callable[[], object]


def first_steps_count(new_training: Callable[[], Step], steps: int, device: torch.device) -> tuple[float, float]:
    """(fooled, honest) seconds per step: a new training's first steps, and as many once they are steady."""
    step = new_training()
    first_s = measure.time_steps(step, steps, device)  # allocates, chooses kernels, fills caches
    measure.warm_up(step, device)
    later_s = measure.time_steps(step, steps, device)
    return statistics.fmean(first_s), statistics.median(later_s)
