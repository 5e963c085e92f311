"""Way 6: a baseline that nobody would run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labs.kit import measure


def baseline_in_debug_mode(
    step: Callable[[], object], rounds: int, device: torch.device, seed: int
) -> tuple[float, float]:
    """(fooled, honest) speed-up of a training step over a baseline that is the same step: the truth is 1."""

    def forgotten() -> None:
        with torch.autograd.set_detect_anomaly(True):  # left on after a search for a NaN
            step()

    sides = {"ours": step, "forgotten": forgotten, "usual": step}
    seconds = measure.interleave(sides, rounds, device, seed=seed)
    ours_s, forgotten_s, usual_s = (statistics.median(seconds[side]) for side in sides)
    return forgotten_s / ours_s, usual_s / ours_s
