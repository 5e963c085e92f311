"""Timing that can be trusted: synchronised, warmed up, every sample kept, an interval on every number.

Comparisons interleave A B A B in one run and look at the ratio pair by pair, so that a slow spell of the
machine hits both sides alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

LEVEL = 0.95
PREFIXED = {"s": 1e-9, "B": 1.0, "FLOP": 1.0, "B/s": 1.0, "FLOP/s": 1.0}  # units that take a prefix, from which size
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
    rank's opinion into everyone's (`rank.agree`).
    """
    seconds: list[float] = []
    while len(seconds) < max_steps:
        seconds += time_steps(step, min(window, max_steps - len(seconds)), device)
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
        """For example "12.3 ms [12.1, 12.9]", "1.76 x [1.70, 1.81]" or "3.1e-08 [2.9e-08, 3.4e-08]"."""
        numbers = (self.value, self.low, self.high)
        size = max(map(abs, numbers))
        scale, prefix = _prefix(size, self.unit)
        exact = scale == 1 and all(x == round(x) for x in numbers) and size < 1e6  # counts
        value, low, high = (f"{x:.0f}" if exact else _text(x / scale, size / scale) for x in numbers)
        unit = "" if self.unit == "1" else f" {prefix}{self.unit}".rstrip()
        return f"{value}{unit} [{low}, {high}]"

    def scaled(self, factor: float, unit: str | None = None) -> Estimate:
        """All three numbers times `factor` > 0."""
        unit = self.unit if unit is None else unit
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n, unit)


def _prefix(size: float, unit: str) -> tuple[float, str]:
    """SI prefix for base units; shares, ratios and counts keep their unit, and there are no milli-bytes."""
    smallest = PREFIXED.get(unit, 1.0)
    if unit not in PREFIXED or size < smallest:
        return 1.0, ""
    return next(((scale, p) for scale, p in PREFIXES if max(smallest, scale) <= size), (1.0, ""))


def _text(x: float, size: float) -> str:
    """`x` with as many decimals as `size` needs for 3 digits; powers of ten outside of 0.001 to a million."""
    if size and not 1e-3 <= size < 1e6:
        return f"{x:.1e}"
    decimals = 2 - math.floor(math.log10(size)) if size else 0
    return f"{x:.{max(0, decimals)}f}"


def estimate(samples: Sequence[float], unit: str = "", *, level: float = LEVEL) -> Estimate:
    """Median of `samples` with its percentile bootstrap interval (9,999 resamples, fixed seed).

    With fewer than 2 different samples the interval is the point itself. Take at least 5: the interval cannot
    reach beyond the extremes, which hold the true median with probability 1 - 2^(1-n), that is 75 % for 3 samples
    and 94 % for 5. With 8 to 30 samples it misses it in 7 to 9 % of all cases, not 5. ValueError without samples.
    """
    if not len(samples):
        raise ValueError("an estimate needs at least one sample")
    median = statistics.median(samples)
    if len(set(samples)) < 2:
        return Estimate(median, median, median, len(samples), unit)
    import numpy as np
    from scipy.stats import bootstrap  # imported late: it costs half a second that ranks need not pay

    found = bootstrap(
        (np.asarray(samples, float),),
        np.median,
        confidence_level=level,
        method="percentile",
        n_resamples=9999 if len(samples) <= 1000 else 999,
        batch=max(1, 2_000_000 // len(samples)),  # some 16 MB at a time
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return Estimate(median, float(low), float(high), len(samples), unit)


def paired_ratio(a: Sequence[float], b: Sequence[float], unit: str = "x") -> Estimate:
    """Median of a[i] / b[i] with its interval. Pairs must have been taken one after the other.

    ValueError if the numbers of samples differ or a b[i] is 0.
    """
    if not all(b):
        raise ValueError("a ratio needs denominators other than 0")
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
