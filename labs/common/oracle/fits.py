"""What fits: the largest batch in a given number of bytes, and the cards of labs/kit/gpus.toml."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from labs.common.oracle import fake
from labs.common.oracle.step import Model
from labs.common.oracle.trace import Trace
from labs.kit import hardware
from labs.kit.errors import BadInput

MOST_ROWS = 1 << 20  # no search above this batch
STRIDE = 16  # limits extrapolation: a small batch, whose peak is in the optimizer's step, says nothing about large ones
RESERVE = 0.1  # share of a card to keep free: CUDA's context, workspace, fragmentation


@dataclass(frozen=True)
class Largest:
    """The largest batch that fits."""

    rows: int
    """0 if not even one row (or, with micro-batches, one row in each) fits."""
    peak_bytes: int | None
    """Peak of `rows`; None if that is 0."""
    next_bytes: int | None
    """Peak of one row more, which is too much; None if `rows` is the search limit."""
    traced: dict[int, int] = field(default_factory=dict)
    """Peaks of all batches traced during the search."""


def largest_batch(source: fake.Source | Model, memory_bytes: float, **conditions: Any) -> Largest:
    """Find the largest batch whose step fits in `memory_bytes`, by tracing it and a batch with one row more.

    `source` and `conditions` are as in labs.common.oracle.step; a Model has its own, and reuses its earlier traces.
    Between two traces, assumes that the peak is linear, which it nearly is. BadInput for a model that can't be traced.
    """
    model = source if isinstance(source, Model) else Model(source, **conditions)
    least, traced = model.conditions.micro_batches, dict(model.peaks)
    while rows := _next(traced, memory_bytes, least):
        traced[rows] = _peak(model, rows, bool(traced))
    fit = max((n for n, nbytes in traced.items() if nbytes <= memory_bytes), default=0)
    return Largest(fit, traced.get(fit), traced.get(fit + 1), traced)


def _peak(model: Model, rows: int, others_ran: bool) -> int:
    """Trace the peak; if the model can't run so few rows (BatchNorm on one number), return more than any card has."""
    try:
        return model.step(rows).peak_bytes
    except BadInput:
        if not others_ran:
            raise
        return sys.maxsize


def _next(traced: dict[int, int], memory_bytes: float, least: int) -> int:
    """Return the batch to trace next, or 0 if the last one that fits and one row more are known."""
    fit = sorted(n for n, nbytes in traced.items() if nbytes <= memory_bytes)
    over = min((n for n in traced if n not in fit), default=None)
    if not fit:
        return 2 * least if over is None else 0 if over <= least else max(least, over // 2)
    if over is not None:
        share = (memory_bytes - traced[fit[-1]]) / (traced[over] - traced[fit[-1]])
        gap = over - fit[-1]
        return fit[-1] + min(max(int(share * gap), 1), gap - 1) if gap > 1 else 0
    if len(fit) == 1:
        return 2 * fit[0]
    low, high = fit[-2:]
    slope = (traced[high] - traced[low]) / (high - low)
    more = (memory_bytes - traced[high]) / slope if slope > 0 else math.inf
    return high + int(min(max(more, 1), STRIDE * high, MOST_ROWS - high)) if high < MOST_ROWS else 0


@dataclass(frozen=True)
class Card:
    """Whether a step fits a card."""

    gpu: str
    memory_bytes: int | None
    """As nvidia-smi prints it, or as sold (10^9 bytes to the GB) if gpus.toml has only that; None: neither."""
    margin_bytes: int | None
    """What the step leaves free; negative: what is missing. CUDA's context and fragmentation take more."""
    verdict: Literal["fits", "tight", "does not fit", "unknown"]
    """tight: the margin is less than a tenth of the card, which the context and fragmentation may well take."""


def cards(step: Trace | float) -> list[Card]:
    """Judge every card of labs/kit/gpus.toml, in order, for a trace (target "cuda") or a number of bytes."""
    needed = step.peak_bytes if isinstance(step, Trace) else step
    return [_card(spec.gpu, memory_bytes(spec.gpu), needed) for spec in hardware.specs()]


def memory_bytes(gpu: str) -> int | None:
    """Return the total memory of a card of labs/kit/gpus.toml; None if no figure has a source."""
    row = hardware.spec(gpu)
    sold = round(row.memory_gb * 1e9) if row and row.memory_gb else None
    return hardware.usable_bytes(gpu) or sold


def _card(gpu: str, memory: int | None, needed: float) -> Card:
    if memory is None:
        return Card(gpu, None, None, "unknown")
    margin = memory - math.ceil(needed)
    verdict = "does not fit" if margin < 0 else "tight" if margin < RESERVE * memory else "fits"
    return Card(gpu, memory, margin, verdict)
