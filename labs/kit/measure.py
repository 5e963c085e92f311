"""Timing that can be trusted: synchronised, warmed up, every sample kept, an interval on every number.

Comparisons interleave A B A B in one run and look at the ratio pair by pair, so that a slow spell of the
machine hits both sides alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

LEVEL = 0.95
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def sync(device: torch.device) -> None:
    """Wait until `device` has finished its queue. Without this a clock times the launch of work, not the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_steps(step: Callable[[], object], n: int, device: torch.device) -> list[float]:
    """Seconds of each of `n` calls of `step`, the device synchronised before every clock read."""
    seconds = []
    for _ in range(n):
        sync(device)
        start = time.perf_counter()
        step()
        sync(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def warm_up(
    step: Callable[[], object], device: torch.device, *, window: int = 5, tolerance: float = 0.1,
    max_steps: int = 40, agree: Callable[[bool], bool] = bool,
) -> list[float]:  # fmt: skip
    """Call `step` until two windows in a row have medians within `tolerance`; returns the seconds of each call.

    With several ranks all must stop at the same step, or a collective waits for ever: `agree` turns this
    rank's opinion into everyone's.
    """
    seconds: list[float] = []
    while len(seconds) < max_steps:
        seconds += time_steps(step, window, device)
        if agree(is_steady(seconds, window, tolerance)):
            break
    return seconds


def is_steady(seconds: Sequence[float], window: int = 5, tolerance: float = 0.1) -> bool:
    """Whether the medians of the last two windows of `seconds` differ by at most `tolerance`, relatively."""
    if len(seconds) < 2 * window:
        return False
    before, last = statistics.median(seconds[-2 * window : -window]), statistics.median(seconds[-window:])
    return abs(last - before) <= tolerance * before


@dataclass(frozen=True)
class Estimate:
    """A value with the interval that its samples support, in `unit`; `n` is how many samples."""

    value: float
    low: float
    high: float
    n: int
    unit: str = ""

    def __str__(self) -> str:
        scale, prefix = _prefix(max(abs(self.value), abs(self.high)), self.unit)
        digits = _digits(self.high / scale)
        value, low, high = (f"{x / scale:.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{value} {prefix}{self.unit} [{low}, {high}]".replace("  ", " ")

    def scaled(self, factor: float, unit: str | None = None) -> Estimate:
        """All three numbers times `factor` > 0."""
        unit = self.unit if unit is None else unit
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n, unit)


def _prefix(size: float, unit: str) -> tuple[float, str]:
    """SI prefix for base units; shares, ratios and counts keep their unit."""
    if unit not in {"s", "B", "FLOP/s", "B/s", "FLOP"} or size == 0:
        return 1.0, ""
    return next(((scale, p) for scale, p in PREFIXES if size >= scale), PREFIXES[-1])


def _digits(size: float) -> int:
    size = abs(size)
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4


def estimate(samples: Sequence[float], unit: str = "", *, level: float = LEVEL) -> Estimate:
    """Median of `samples` with its percentile bootstrap interval (9,999 resamples, fixed seed).

    With fewer than 2 different samples the interval is the point itself. A median of few samples has a coarse
    interval: below 6 it cannot exclude more than the extremes.
    """
    median = statistics.median(samples)
    if len(set(samples)) < 2:
        return Estimate(median, median, median, len(samples), unit)
    import numpy as np
    from scipy.stats import bootstrap  # imported late: it costs half a second that ranks need not pay

    found = bootstrap(
        (np.asarray(samples),), np.median, confidence_level=level, method="percentile", rng=np.random.default_rng(0)
    )
    low, high = found.confidence_interval
    return Estimate(median, float(low), float(high), len(samples), unit)


def paired_ratio(a: Sequence[float], b: Sequence[float], unit: str = "x") -> Estimate:
    """Median of a[i] / b[i] with its interval. Pairs must have been taken one after the other.

    ValueError if the numbers of samples differ.
    """
    return estimate([x / y for x, y in zip(a, b, strict=True)], unit)


def differs(ratio: Estimate, null: float = 1.0) -> bool:
    """Whether the interval of `ratio` leaves out `null`."""
    return not ratio.low <= null <= ratio.high


def verdict(ratio: Estimate, what: str) -> str:
    """One sentence on a ratio: by how much `what` differs, or that this run cannot show a difference."""
    if not differs(ratio):
        return f"{what}: no difference that this run can show ({ratio})"
    return f"{what}: {ratio}"


def interleave(
    steps: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, *, inner: int = 1,
    between: Callable[[], object] = lambda: None, on_round: Callable[[int], object] = lambda done: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds per call of each step, timed as blocks of `inner` calls, in turn: `{name: [one per round]}`.

    `between` runs before every block, outside the clock: a barrier, when ranks must start together.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds):
        for name, step in steps.items():
            between()
            sync(device)
            start = time.perf_counter()
            for _ in range(inner):
                step()
            sync(device)
            seconds[name].append((time.perf_counter() - start) / inner)
        on_round(done + 1)
    return seconds
