"""Two machines in virtual time, on which a benchmark takes no time at all and always sees the same faults."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from labs.kit.check import Mistake


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
