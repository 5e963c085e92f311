"""Exercise 01.1: a benchmark that can be trusted, tried on simulated devices whose times are known."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from labs.kit.answers import number
from labs.kit.check import Mistake

# -- the task: devices whose times are known


@dataclass(frozen=True)
class Reading:
    """One look at the clock: how much had been done by then. `queued` steps had been started and not finished."""

    seconds: float
    steps: int
    batches: int
    waits: int
    queued: int


class Batch:
    """What make_batch() returns and step() takes."""


class SimulatedDevice:
    """An accelerator that works through a queue while the host runs ahead.

    `step` takes about `step_s` seconds of the device's time, much longer for the first `warm_up_steps`, and one in
    eight is hit by an outlier. Every reading of the clock is kept in `readings`.
    """

    def __init__(self, step_s: float, warm_up_steps: int, batch_s: float, seed: int) -> None:
        self.step_s, self.warm_up_steps, self.batch_s = step_s, warm_up_steps, batch_s
        self.readings: list[Reading] = []
        self._random = random.Random(seed)
        self._now = self._random.uniform(1e3, 1e4)
        self._ends: list[float] = []
        self._batches = 0
        self._waits = 0

    @property
    def steps(self) -> int:
        """Steps started so far."""
        return len(self._ends)

    @property
    def waits(self) -> int:
        """Calls of synchronize() so far."""
        return self._waits

    def make_batch(self) -> Batch:
        """A batch; costs the host `batch_s`."""
        self._now += self.batch_s
        self._batches += 1
        return Batch()

    def step(self, batch: Batch) -> None:
        """Queue one step. Mistake if `batch` is not one of this device's batches."""
        if not isinstance(batch, Batch):
            what = "the function make_batch itself" if callable(batch) else f"{batch!r:.60}"
            raise Mistake(f"step() was given {what}, not a batch", "step(batch), with batch = make_batch() before it")
        self._now += 0.004 * self.step_s  # the launch
        self._ends.append(max([self._now, *self._ends[-1:]]) + self._cost())

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._waits += 1
        self._now = max([self._now, *self._ends[-1:]]) + 1e-6

    def clock(self) -> float:
        """Virtual seconds."""
        queued = self.steps - bisect_right(self._ends, self._now)
        self.readings.append(Reading(self._now, self.steps, self._batches, self._waits, queued))
        self._now += 1e-7
        return self.readings[-1].seconds

    def _cost(self) -> float:
        seconds = self.step_s * self._random.gauss(1, 0.04)
        outlier = self._random.uniform(3, 8) if self._random.random() < 1 / 8 else 1
        if self.steps < self.warm_up_steps:
            return seconds * (2.5 + 20 / (1 + self.steps))
        return seconds * outlier


@dataclass(frozen=True)
class Version:
    """One of two versions of a program. It does not run by itself."""

    name: str
    seconds: float

    def __call__(self, *_: Any) -> None:
        raise Mistake(f"you called {self.name}() yourself", f"pass the function itself: seconds_of({self.name})")


@dataclass(frozen=True)
class Run:
    """One run of a version, `name`, and the seconds it took."""

    name: str
    seconds: float


class DriftingMachine:
    """A machine on which everything gets slower by half after `quiet_runs` runs, for good.

    Of two runs in a row the second one takes longer by the share `second_slower`; `noise` is the relative standard
    deviation of a run. Every run is kept in `runs`.
    """

    def __init__(self, quiet_runs: int, second_slower: float, noise: float, seed: int) -> None:
        self.runs: list[Run] = []
        self._quiet_runs, self._second_slower, self._noise = quiet_runs, second_slower, noise
        self._random = random.Random(seed)

    def seconds_of(self, version: Version) -> float:
        """Run `version` once; its seconds. Mistake if it is no version."""
        if not isinstance(version, Version):
            raise Mistake(f"seconds_of() was given {version!r:.60}", "pass it a or b, the functions themselves")
        second, late = len(self.runs) % 2, len(self.runs) >= self._quiet_runs
        seconds = version.seconds * self._random.gauss(1, self._noise)
        seconds *= (1 + self._second_slower * second) * (1.5 if late else 1)
        self.runs.append(Run(version.name, seconds))
        return seconds


# -- the checks


Function = Callable[..., Any]
SAMPLES = 20
"""The least number of timed samples that the exercise asks for."""
LONGEST_BLOCK = 3
"""Steps. One in eight is an outlier, so that 1 - (7/8)^3 = 33 % of such blocks hold one."""
WARM_UP = 10
"""After so many steps every simulated device is steady; the exercise says so."""


@dataclass(frozen=True)
class Interval:
    """What happened between two readings of the clock, at least one step among it."""

    start: Reading
    end: Reading

    @property
    def steps(self) -> int:
        return self.end.steps - self.start.steps

    @property
    def seconds(self) -> float:
        return self.end.seconds - self.start.seconds

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps


Finding = tuple[str, str]
"""What was done, and a hint."""


def check_benchmark(f: Function) -> None:
    """Four devices of different speed, warm-up and cost of a batch; each knows what every slip would return."""
    for k, case in enumerate(DEVICES):
        value, device = _ran(f, *case)
        answer, every = _answer(value, device)
        faults, how = _kindest(_explanations(answer, every), device)
        if faults and (others := _other_devices(f, DEVICES[:k] + DEVICES[k + 1 :])):
            faults, how = _kindest(_most_often(answer, every, others), device)
        close = math.isclose(answer, device.step_s, rel_tol=0.05)
        truth = f"Your answer means {_text(answer)}; a typical step of this device takes {_text(device.step_s)}"
        if faults:
            what, hint = faults[0]
            raise Mistake(f"{what}. {'Your answer is close this time; do not count on that' if close else truth}", hint)
        if how == "unknown" and not close:
            raise Mistake(truth, "keep the seconds of each step in a list, and return the list's median")


DEVICES = ((0.02, 7, 0.6), (0.18, 10, 0.3), (0.0045, 3, 2.0), (0.06, 9, 0.1))
"""(seconds of a step, steps of warm-up, a batch's share of a step)."""
Answered = tuple[float, list[Interval]]


def _ran(f: Function, step_s: float, warm_up_steps: int, batch_share: float) -> tuple[Any, SimulatedDevice]:
    device = SimulatedDevice(step_s, warm_up_steps, batch_share * step_s, seed=warm_up_steps)
    return f(device.step, device.make_batch, device.synchronize, device.clock), device


def _answer(value: Any, device: SimulatedDevice) -> Answered:
    if len(device.readings) < 2:
        raise Mistake(
            f"clock() was {'never called' if not device.readings else 'read only once'}, so nothing was timed with it",
            "the device lives in virtual time that only clock() shows: time.perf_counter() knows nothing of it",
        )
    answer = number(value, "0.0123, the seconds of one step")
    every = [Interval(*both) for both in pairwise(device.readings) if both[1].steps > both[0].steps]
    if not every:
        raise Mistake("no step ran between two readings of the clock", "read it before step(batch), and again after it")
    return answer, every


def _other_devices(f: Function, cases: Sequence[tuple[float, int, float]]) -> list[Answered]:
    """What a wrong answer says of other devices, [] where it fails there."""
    try:
        return [_answer(*_ran(f, *case)) for case in cases]
    except Exception:
        return []


Explanation = tuple[list[Interval], str, tuple[int, int]]
"""The intervals that an answer may have come from, by which statistic, and how it would come about elsewhere, too."""


def _kindest(explanations: list[Explanation], device: SimulatedDevice) -> tuple[list[Finding], str]:
    """Faults and statistic. The same number can come about in several ways: a minimum with and without the warm-up."""
    return min(((list(_faults(used, how, device)), how) for used, how, _ in explanations), key=lambda e: len(e[0]))


def _most_often(answer: float, every: list[Interval], others: list[Answered]) -> list[Explanation]:
    """Those that explain the most of the other devices, too: a median may be the last sample by chance."""
    found = _explanations(answer, every)
    elsewhere = [{_kind(e) for e in _explanations(*other)} for other in others]
    times = [sum(_kind(e) in kinds for kinds in elsewhere) for e in found]
    return [e for e, n in zip(found, times, strict=True) if n == max(times)]


def _kind(explanation: Explanation) -> Any:
    _, how, place = explanation
    return how if how == "last" else place


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:,.4g} s"


def _explanations(answer: float, every: list[Interval]) -> list[Explanation]:
    """From which intervals, perhaps without the first ones, and by which statistic `answer` may have come."""
    suffixes = [every[-1:], *(every[skipped:] for skipped in range(min(50, len(every) - 1)))]
    one_of_many = every[-1].steps == every[-2].steps if len(every) > 1 else False
    found = [
        (used, "last" if one_of_many and len(used) == 1 else name, (len(every) - len(used), place))
        for used in suffixes
        for place, (name, value) in enumerate(_statistics(used))
        if math.isclose(answer, value, rel_tol=1e-6)
    ]
    late = [i for i in every if i.start.steps >= WARM_UP] or every
    if not found and any(math.isclose(answer, i.per_step, rel_tol=1e-6) for i in every):
        return [(late, "one of many", (0, 0))]
    for used in (every, late):
        names = (name for name, value in _rarer(used, answer) if math.isclose(answer, value, rel_tol=1e-6))
        if not found and (name := next(names, None)):
            return [(used, name, (0, 0))]
    return found or [(late, "unknown", (0, 0))]


def _statistics(used: list[Interval]) -> Iterator[tuple[str, float]]:
    samples, seconds = sorted(i.per_step for i in used), [i.seconds for i in used]
    steps, median = sum(i.steps for i in used), statistics.median(samples)
    yield from (("median", m) for m in (median, samples[len(used) // 2], samples[(len(used) - 1) // 2]))
    yield from (("mean", statistics.fmean(samples)), ("mean", sum(seconds) / steps))
    yield from (("minimum", samples[0]), ("maximum", samples[-1]))
    yield from (("total", sum(seconds)), ("block", statistics.median(seconds)))
    yield from (("milliseconds", 1e3 * median), ("microseconds", 1e6 * median), ("nanoseconds", 1e9 * median))
    yield "rate", 1 / median


def _rarer(used: list[Interval], answer: float) -> Iterator[tuple[str, float]]:
    samples, seconds = [i.per_step for i in used], [i.seconds for i in used]
    median = statistics.median(samples)
    yield "negative", -median
    yield from ((f"{q}th percentile", float(np.percentile(samples, q))) for q in (5, 10, 25, 75, 90, 95))
    yield from (("rounded", r) for r in (round(median, digits) for digits in range(5)) if abs(r / median - 1) > 0.04)
    if len(per := {i.steps for i in used}) == 1:
        yield from ((f"divided by {k}", statistics.median(seconds) / k) for k in range(2, 11) if k not in per)
    parts = sum(seconds) / answer if answer else 0
    if 1 < parts < 1e4:
        yield f"{round(parts)} parts", sum(seconds) / round(parts)


def _faults(used: list[Interval], statistic: str, device: SimulatedDevice) -> Iterator[Finding]:
    """Faults of the intervals that made the answer, those that spoil it most first."""
    yield from _not_waited_for(used, device)
    yield from _not_warm(used, statistic, device)
    if late := [k for k, i in enumerate(used, 1) if i.start.queued]:
        yield (
            f"when sample {late[0]} began, {used[late[0] - 1].start.queued} earlier steps were still in the queue: "
            "their time went into it",
            "synchronize() before the reading that starts a sample as well",
        )
    if made := sum(i.end.batches - i.start.batches for i in used):
        yield (
            f"{made} batches were made while the clock ran",
            "batch = make_batch() before the first reading: the question is how long a step takes",
        )
    yield from _few(used, statistic)
    yield from _not_the_median(used, statistic)


def _not_waited_for(used: list[Interval], device: SimulatedDevice) -> Iterator[Finding]:
    early, n = sum(i.end.queued > 0 for i in used), len(used)
    if not early:
        return
    if not device.waits:
        yield (
            "synchronize() is never called: step() returns as soon as its work is queued, and you did not wait for it",
            "synchronize() before the reading of the clock that ends a sample",
        )
    elif n == 1:
        yield (
            f"at the second reading of the clock {used[0].end.queued} steps were still in the queue",
            "synchronize() between the last step and the second reading, not only before the first",
        )
    elif device.waits - used[0].end.waits <= 1:
        yield (
            f"synchronize() comes once, after the loop: at {early} of {n} readings the step was still running",
            "synchronize() after each step(batch), before the reading that ends its sample",
        )
    else:
        yield (
            f"at {early} of the {n} readings that end a sample the step was still running",
            "synchronize() before the first reading, and again between step(batch) and the second",
        )


def _not_warm(used: list[Interval], statistic: str, device: SimulatedDevice) -> Iterator[Finding]:
    thrown, steps = used[0].start.steps, sum(i.steps for i in used)
    slow = device.warm_up_steps - thrown
    if slow <= 0:
        return
    if statistic.endswith(" parts") and int(statistic.split()[0]) < steps:
        yield (
            f"{steps} steps ran between your readings and you divide by {statistic.split()[0]}: the warm-up is "
            "inside the clock",
            "read the clock for the first time after the warm-up",
        )
    elif thrown == 0:
        yield (
            f"no warm-up: the first {slow} steps of this device, up to 20 times slower, are in what you timed",
            f"run {WARM_UP} steps before you time any, or throw their samples away",
        )
    else:
        yield (
            f"{thrown} steps of warm-up are too few: {slow} more were slow, and you timed them",
            f"a device may need {WARM_UP} steps to settle",
        )


def _few(used: list[Interval], statistic: str) -> Iterator[Finding]:
    steps, n = sum(i.steps for i in used), len(used)
    if statistic == "last":
        yield "you return the last of your samples only", "append each to a list, and return the list's median"
    elif steps == 1:
        yield "you timed one step, and one in eight is an outlier", f"take at least {SAMPLES} samples"
    elif n == 1 and statistic in {"median", "mean"}:
        yield (
            f"one interval around {steps} steps can only give their mean, and every outlier is in it",
            "read the clock around each step, keep all samples, return their median",
        )
    elif n > 1 and (block := max(i.steps for i in used)) > LONGEST_BLOCK:
        yield (
            f"your samples are blocks of {block} steps: one step in eight is an outlier, {1 - (7 / 8) ** block:.0%} "
            f"of the blocks hold one, and so their median is no typical step",
            f"read the clock around each step, or around {LONGEST_BLOCK} at most",
        )
    elif 1 < n < SAMPLES:
        yield f"{n} samples are too few", f"time at least {SAMPLES} steps, one by one"


def _not_the_median(used: list[Interval], statistic: str) -> Iterator[Finding]:
    steps, n = sum(i.steps for i in used), len(used)
    known = {
        "mean": (f"this is the mean of {n} samples, and a few outliers pull it up", "return their median"),
        "minimum": ("this is the fastest step, the luckiest of all", "a typical step is the median"),
        "maximum": ("this is the slowest step, an outlier", "a typical step is the median"),
        "total": (f"these are the seconds of all {steps} steps together", "the question is one step: the median"),
        "block": (f"these are the seconds of {steps // n} steps", "divide by the steps that a sample holds"),
        "rate": ("these are steps per second", "return the seconds of a step"),
        "negative": ("these seconds are negative", "the later reading of the clock minus the earlier one"),
        "rounded": ("this is the median, rounded until little is left of it", "return it as it is, in seconds"),
        "one of many": (
            "this is one of your samples, but not their median",
            "sort them before you take the middle one, or use np.median",
        ),
    }
    if statistic in known:
        yield known[statistic]
    elif statistic.endswith("percentile"):
        yield f"this is the {statistic} of {n} samples", "a typical step is the median, the 50th"
    elif statistic.startswith("divided by"):
        what = "one step are" if steps == n else f"{steps // n} steps are"
        yield f"the seconds of {what} {statistic}", "divide by the steps that a sample holds"
    elif statistic.endswith("seconds"):
        yield f"these are {statistic}", "return seconds, as clock() gives them"
    elif statistic.endswith(" parts"):
        yield f"{steps} steps were timed, and you divide by {statistic.split()[0]}", "divide by the steps that ran"
