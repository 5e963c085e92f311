"""Way 5: a single pair of runs decides."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labs.kit import measure


def single_pair_decides(step: Callable[[], object], pairs: int, device: torch.device, seed: int) -> tuple[float, float]:
    """(fooled, honest) factor by which `step` seems to differ from itself, in either direction: the truth is 1."""
    seconds = measure.interleave({"A": step, "B": step}, pairs, device, seed=seed)
    ratios = [b / a for a, b in zip(seconds["A"], seconds["B"], strict=True)]
    one, many = ratios[0], statistics.median(ratios)
    return max(one, 1 / one), max(many, 1 / many)
