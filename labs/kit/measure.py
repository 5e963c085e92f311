"""Timing you can trust: synchronised, warmed up, with every sample kept and an interval on every number.

Comparisons interleave A and B in one run, in random order, and take the ratio pair by pair, so a slow phase of the
machine affects both equally.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from labs.kit.errors import require

T = TypeVar("T")
LEVEL = 0.95
PREFIXED = {"s": 1e-9, "B": 1.0, "FLOP": 1.0, "B/s": 1.0, "FLOP/s": 1.0}  # smallest size that takes an SI prefix
PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def sync(device: torch.device) -> None:
    """Wait until `device` has finished its queue. Without this, a clock times the launch of work, not the work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_steps(step: Callable[[], object], n: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `n` calls of `step`, with the device synchronised before each clock read."""
    seconds = []
    for _ in range(n):
        sync(device)
        start = time.perf_counter()
        step()
        sync(device)
        seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class WarmUp:
    """The calls before a measurement: seconds of each, and whether they were steady by the last."""

    seconds: tuple[float, ...]
    settled: bool

    @property
    def steps(self) -> int:
        """Number of calls."""
        return len(self.seconds)

    def __str__(self) -> str:
        """Return "steady after 18 steps", or by how much the second half differs from the first."""
        if self.settled:
            return f"steady after {self.steps} steps"
        half = max(1, self.steps // 2)
        change = statistics.median(self.seconds[-half:]) / statistics.median(self.seconds[:half]) - 1
        by = f"{100 * abs(change):.0f} % {'slower' if change >= 0 else 'faster'}"
        return f"not steady within {self.steps} steps: the last {half} steps were {by} than the first"


def warm_up(
    step: Callable[[], object],
    device: torch.device,
    *,
    window: int = 6,
    tolerance: float = 0.1,
    max_steps: int = 40,
    agree: Callable[[bool], bool] = bool,
) -> WarmUp:
    """Call `step` until `steady_from` finds a steady part at the end, or `max_steps` times.

    All ranks must stop at the same step, or a collective waits forever. `agree` turns this rank's result into
    everyone's (`rank.agree`).
    """
    seconds: list[float] = []
    settled = False
    while not settled and len(seconds) < max_steps:
        calls = max(1, window // 2) if seconds else 2 * window
        seconds += time_steps(step, min(calls, max_steps - len(seconds)), device)
        settled = agree(steady_from(seconds, window, tolerance) is not None)
    return WarmUp(tuple(seconds), settled)


def steady_from(seconds: Sequence[float], window: int = 6, tolerance: float = 0.1) -> int | None:
    """Return the index from which `seconds` is steady to its end; None if it isn't, or for too few steps to say.

    The level is the median of the last third, or of the last 2 windows if that is more. From the returned step, every
    median of `window` consecutive steps is within `tolerance` of the level, and the total drift is at most `tolerance`.
    If steps vary more, up to 1.5 times the median change between neighbours also counts as level. Medians tolerate up
    to 2 outliers in 6 steps. Time grows with the third power of the length: meant for up to about 200 steps.
    """
    need = max(2 * window, len(seconds) // 3)
    if len(seconds) < need:
        return None
    level = statistics.median(seconds[-need:])
    jump = statistics.median(abs(b - a) for a, b in itertools.pairwise(seconds[-need:]))
    band = max(tolerance * level, 1.5 * jump)
    starts = range(len(seconds) - window + 1)
    off = [i for i in starts if abs(statistics.median(seconds[i : i + window]) - level) > band]
    start = off[-1] + 1 if off else 0
    # The first window that is level may still start with up to 2 steps that aren't.
    start += next((i for i, s in enumerate(seconds[start : start + window]) if abs(s - level) <= band), 0)
    rest = range(start, len(seconds) - need + 1, window)
    return next((i for i in rest if abs(_drift(seconds[i:])) <= tolerance * level), None)


def _drift(seconds: Sequence[float]) -> float:
    """Return the rise of `seconds` from end to end by the Theil-Sen slope (median of all pairs)."""
    pairs = itertools.combinations(enumerate(seconds), 2)
    return len(seconds) * statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval, in `unit`, from `n` samples.

    The interval contains the true median in 95 % of runs, if samples are independent.
    """

    value: float
    low: float
    high: float
    n: int
    unit: str = ""

    def __str__(self) -> str:
        """Return for example "12.3 ms [12.1, 12.9]", "1.76 x [1.70, 1.81]" or "3.1e-08 [2.9e-08, 3.4e-08]"."""
        numbers = (self.value, self.low, self.high)
        size = max((abs(x) for x in numbers if math.isfinite(x)), default=0.0)
        scale, prefix = _prefix(size, self.unit)
        exact = scale == 1 and size < 1e6 and all(math.isfinite(x) and x == round(x) for x in numbers)  # counts
        value, low, high = (f"{x:.0f}" if exact else _text(x / scale, size / scale) for x in numbers)
        unit = "" if self.unit == "1" else f" {prefix}{self.unit}".rstrip()
        return f"{value}{unit} [{low}, {high}]"

    def scaled(self, factor: float, unit: str | None = None) -> Estimate:
        """Multiply all three numbers by `factor` > 0."""
        unit = self.unit if unit is None else unit
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n, unit)


def _prefix(size: float, unit: str) -> tuple[float, str]:
    """Return (scale, SI prefix) for base units. Shares, ratios and counts take none; bytes no prefix below 1."""
    smallest = PREFIXED.get(unit, 1.0)
    if unit not in PREFIXED or size < smallest:
        return 1.0, ""
    return next(((scale, p) for scale, p in PREFIXES if max(smallest, scale) <= size), (1.0, ""))


def _text(x: float, size: float) -> str:
    """Format `x` with the decimals that `size` needs for 3 digits, or with an exponent outside 0.001 to a million."""
    if size and not 1e-3 <= size < 1e6:
        return f"{x:.1e}"
    decimals = 2 - math.floor(math.log10(size)) if size else 0
    return f"{x:.{max(0, decimals)}f}"


def estimate(samples: Sequence[float], unit: str = "", *, level: float = LEVEL, resamples: int = 9999) -> Estimate:
    """Return the median of `samples` with its bootstrap interval, which contains the true median in `level` of runs.

    Samples must be independent. If neighbours resemble each other, as in a slow phase of the machine, the interval is
    too narrow.

    A plain percentile interval is too narrow for few samples. For ratios of noisy times, it missed the true median in
    12 % of cases with 7 samples, 8 % with 8 and 6 % with 20, instead of 5. So we expand the percentiles by the ratio of
    Student's t to the normal distribution (Hesterberg 2015, "What teachers should know about the bootstrap",
    arXiv:1411.5279). That gives 3, 3 and 4 % (simulated, 3,000 times each).

    With fewer than 2 different samples, the interval is the point itself. Take at least 6: no interval reaches beyond
    the extremes, which contain the true median with probability 1 - 2^(1-n), 75 % for 3 samples, 94 % for 5. Fewer
    `resamples` (999) are enough for counting thousands of intervals. The seed is fixed. ValueError without samples.
    """
    if not len(samples):
        raise ValueError("an estimate needs at least one sample")
    median = statistics.median(samples)
    if len(set(samples)) < 2:
        return Estimate(median, median, median, len(samples), unit)
    from scipy.stats import bootstrap

    n = len(samples)
    drawn = bootstrap(
        (samples,),
        np.median,
        n_resamples=resamples if n <= 1000 else min(resamples, 999),
        batch=max(1, 2_000_000 // n),  # about 16 MB at a time
        confidence_level=_expanded(level, n),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    low = min(max(drawn.low, min(samples)), median)  # interpolating between equal numbers can change the last digit
    high = max(min(drawn.high, max(samples)), median)
    return Estimate(median, float(low), float(high), n, unit)


def mean(samples: Sequence[float], unit: str = "") -> Estimate:
    """Return the mean of `samples`, which is what a long training run costs, with its 95 % interval by Student's t.

    With one sample, the interval is the point itself. Samples must be independent. ValueError without samples.
    """
    from scipy.special import stdtrit

    n = len(samples)
    if not n:
        raise ValueError("a mean needs at least one sample")
    value = statistics.fmean(samples)
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * statistics.stdev(samples) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(value, value - half, value + half, n, unit)


def _expanded(level: float, n: int) -> float:
    """Return the level at which a percentile bootstrap interval of `n` samples covers about `level`."""
    from scipy.special import ndtr, stdtrit

    return float(1 - 2 * ndtr(math.sqrt(n / (n - 1)) * stdtrit(n - 1, (1 - level) / 2)))


def paired_ratio(a: Sequence[float], b: Sequence[float], unit: str = "x", *, resamples: int = 9999) -> Estimate:
    """Return the median of a[i] / b[i] with its interval. Each pair must come from the same round, close in time.

    A mean of ratios would favour one side, since 2 and 1/2 average to 1.25. With a median, swapping a and b inverts the
    result. ValueError if the numbers of samples differ or a b[i] is 0.
    """
    if not all(b):
        raise ValueError("a ratio needs denominators other than 0")
    return estimate([x / y for x, y in zip(a, b, strict=True)], unit, resamples=resamples)


def proportion(count: int, n: int) -> Estimate:
    """Return `count` of `n` as a share with its 95 % Wilson interval, valid even near 0 and 1. ValueError for n = 0."""
    if not n:
        raise ValueError("a share needs at least one case")
    from scipy.stats import binomtest

    found = binomtest(count, n).proportion_ci(LEVEL, method="wilson")
    return Estimate(count / n, float(found.low), float(found.high), n, "1")


def total_rate(seconds: Sequence[Sequence[float]], items: float) -> list[float]:
    """Return all ranks' items per second, block by block. `seconds` is [rank][block], with `items` per rank and block.

    For free-running ranks: each rank's own time counts, and no block is stretched to the slowest rank's.
    """
    return [sum(items / s for s in block) for block in zip(*seconds, strict=True)]


def differs(ratio: Estimate, null: float = 1.0) -> bool:
    """Return whether the interval of `ratio` excludes `null`."""
    return not ratio.low <= null <= ratio.high


def direction(ratio: Estimate) -> str:
    """Return "faster" or "slower" for a ratio of rates, or "inconclusive" if its interval contains 1."""
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "inconclusive"


def fewest(level: float = LEVEL) -> int:
    """Return the smallest number of samples that supports an interval at `level`: 6 at 95 %.

    No interval of the median reaches beyond the extremes, which contain the true median with probability 1 - 2^(1-n)
    (see `estimate`).
    """
    return 1 + math.ceil(-math.log2(1 - level))


LEAST_ROUNDS, MOST_ROUNDS = fewest(), 60
"""Limits for a Budget. Beyond 60 rounds an interval hardly narrows: halving it takes four times as many."""


def rounds_within(seconds: float, round_s: float, least: int = LEAST_ROUNDS, most: int = MOST_ROUNDS) -> int:
    """Return how many rounds of `round_s` seconds fit into `seconds`, between `least` (even if too long) and `most`."""
    return max(least, math.floor(min(most, seconds / round_s if round_s > 0 else math.inf)))


@dataclass(frozen=True)
class Budget:
    """As many rounds as fit into `seconds`, the same on every rank; pass it to `interleave` instead of a number.

    A slower machine takes fewer rounds and gets wider intervals, but at least `least`, which its intervals need.
    """

    seconds: float
    slowest: Callable[[Sequence[float]], Sequence[float]] = list
    """Pass `rank.slowest`, a collective, if several ranks take the rounds together: the slowest rank's clock counts."""
    least: int = LEAST_ROUNDS
    most: int = MOST_ROUNDS

    def total(self, done: int, elapsed_s: float) -> int:
        """Return the expected total of rounds, after `done` took `elapsed_s` on this rank; the same on all ranks.

        All ranks must call it together. Before `least` rounds are done, it is a local estimate without communication.
        """
        if done >= self.least:
            [elapsed_s] = self.slowest([elapsed_s])
        return max(done, rounds_within(self.seconds, elapsed_s / done, self.least, self.most))


def require_budget(seconds: float, rounds: int | None, least: int = 1) -> None:
    """Raise BadInput unless `seconds` is valid for a `Budget` and `rounds`, if given, is at least `least`."""
    require(0 < seconds < math.inf, f"seconds must be a positive number, not {seconds}")
    why = ": one sample has no interval" if least == 2 else ""
    require(rounds is None or rounds >= least, f"rounds must be at least {least}, not {rounds}{why}")


def rounds_of(
    config: Any, slowest: Callable[[Sequence[float]], Sequence[float]] = list, part: float = 1.0
) -> int | Budget:
    """Return rounds for `interleave`: 2 in a smoke run, `config.rounds` if set, otherwise a Budget of `config.seconds`.

    Each of several measurements takes its `part` of the seconds.
    """
    return 2 if config.smoke else config.rounds or Budget(part * config.seconds, slowest)


def within(items: Iterable[T], rounds: int | Budget) -> Iterator[T]:
    """Yield items until `rounds` are done. A Budget's time includes making and using them."""
    begun = time.perf_counter()
    for done, item in enumerate(items, start=1):
        yield item
        if done >= (rounds if isinstance(rounds, int) else rounds.total(done, time.perf_counter() - begun)):
            return


def interleave(
    steps: Mapping[Any, Callable[[], object]],
    rounds: int | Budget,
    device: torch.device,
    *,
    inner: int = 1,
    between: Callable[[], object] = lambda: None,
    on_round: Callable[[int, int], object] = lambda done, total: None,
    seed: int | None = 0,
) -> dict[Any, list[float]]:
    """Time each step in interleaved blocks of `inner` calls; return {name: [seconds per call, one per round]}.

    Every round runs each step once, in the order of `orders(..., seed)`, which is the same on all ranks; `seed` None
    keeps the given order. `between` runs before each block, untimed: a barrier, if ranks must start together.
    `on_round(done, total)` reports progress; with a Budget, the total is an estimate until the end.

    A Budget ends after a whole round. If the number of steps divides its `least` and `most`, it ends after rounds in
    which each step had each place equally often.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in steps}
    most, cycle = (rounds, 1) if isinstance(rounds, int) else (rounds.most, _cycle(len(steps), rounds))
    begun = time.perf_counter()
    for done, names in enumerate(orders(tuple(steps), most, seed), start=1):
        for name in names:
            between()
            sync(device)
            start = time.perf_counter()
            for _ in range(inner):
                steps[name]()
            sync(device)
            seconds[name].append((time.perf_counter() - start) / inner)
        total = rounds if isinstance(rounds, int) else rounds.total(done, time.perf_counter() - begun)
        over = done % cycle == 0 and done + cycle > total
        on_round(done, done if over else max(total, done + 1))
        if over:
            break
    return seconds


def _cycle(steps: int, budget: Budget) -> int:
    """Return after how many rounds each step had each place; 1 if the budget's limits don't fit."""
    return steps if steps and budget.least % steps == 0 == budget.most % steps else 1


def orders(names: Sequence[Any], rounds: int, seed: int | None = 0) -> Iterator[tuple[Any, ...]]:
    """Yield the order of `names` in each of `rounds` rounds; `seed` None keeps the given order.

    A step that always follows the same neighbour finds the caches and clock rate that this neighbour leaves. Here each
    of n names has each place once in n rounds, and follows each other name equally often in 2 n (Williams 1949,
    "Experimental designs balanced for the estimation of residual effects").
    """
    if seed is None:
        return itertools.repeat(tuple(names), rounds)
    return itertools.islice(_balanced(names, random.Random(seed)), rounds)


def _balanced(names: Sequence[Any], draw: random.Random) -> Iterator[tuple[Any, ...]]:
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(n)]  # 0, 1, -1, 2, -2: no two steps are equal
    while names:
        shuffled = draw.sample(names, n)
        for row in (zigzag, zigzag[::-1]):  # for an odd n, both together are balanced
            for shift in draw.sample(range(n), n):
                yield tuple(shuffled[(place + shift) % n] for place in row)
