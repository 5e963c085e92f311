"""Way 6: a baseline that nobody would run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labs.kit import measure


def baseline_in_debug_mode(step: Callable[[], object], rounds: int, device: torch.device) -> tuple[float, float]:
    """(fooled, honest) speed-up of a training step over a baseline that is the same step: the truth is 1."""

    def forgotten() -> None:
        with torch.autograd.set_detect_anomaly(True):  # left on after a search for a NaN
            step()

    seconds = measure.interleave({"ours": step, "forgotten": forgotten, "usual": step}, rounds, device)
    against_forgotten = measure.paired_ratio(seconds["forgotten"], seconds["ours"])
    against_usual = measure.paired_ratio(seconds["usual"], seconds["ours"])
    return against_forgotten.value, against_usual.value
