"""Way 8: a unit that nobody has defined."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labs.kit import measure
from labs.kit.hardware import require_spec
from labs.parts import models
from labs.parts.sources.published import rtx_4090_epochs
from labs.parts.timing.roofline import training_step_work

ARTICLES_BATCH = 64


def epoch_of_one_batch(step: Callable[[], object], rounds: int, device: torch.device) -> tuple[float, float]:
    """(fooled, honest) seconds of an "epoch": the article's table for one card, and here what its code calls so."""
    [table_s] = rtx_4090_epochs().one("epoch_s", ranks=1).samples
    one_batch = measure.time_steps(step, rounds, device)  # its loop makes one batch of 64 per "epoch"
    return table_s, statistics.median(one_batch)


def least_seconds() -> float:
    """What the article's card would need at the peak of its datasheet: operations of one batch / FLOP/s in FP32."""
    return training_step_work(models.mlp(), ARTICLES_BATCH).flop / (1e12 * require_spec("RTX 4090").tflops("fp32"))
