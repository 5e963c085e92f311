"""Way 3: the best time of one's own program against the median of the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labs.kit import measure


def best_against_median(
    step: Callable[[], object], rounds: int, device: torch.device, seed: int
) -> tuple[float, float]:
    """(fooled, honest) speed-up of `step` over itself: the truth is 1."""
    seconds = measure.interleave({"ours": step, "theirs": step}, rounds, device, seed=seed)  # in turn: no fault
    ours, theirs = seconds["ours"], seconds["theirs"]
    best = statistics.median(theirs) / min(ours)
    in_pairs = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return best, in_pairs
