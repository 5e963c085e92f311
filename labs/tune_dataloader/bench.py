"""The tuner's bench: turns of model, loader and both together, and the rates and ratios that follow from them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from labs.common.loading.feed import Feed, Forever, Step, alone, drive, endless, running
from labs.kit.errors import BadInput
from labs.kit.measure import Estimate, orders
from labs.tune_dataloader.rules import FEWEST, Setting, ratio

Arm = tuple[str, Setting | None]  # ("loader", Setting), ("together", Setting) or MODEL
MODEL: Arm = ("model", None)
MOST_ROUNDS = 6  # if it is not clear by then, the machine is too noisy, and a few more would not help
TURN_S, MODEL_TURN_S = 0.1, 0.04  # least duration of a turn: fast batches are repeated
MODEL_SHARE = 0.1  # of the budget for a turn of the model alone, or slow steps would leave nothing for the loader


@dataclass(frozen=True)
class Turn:
    """One measurement; turns of one `round` (from 1) were taken side by side, those of round 0 one after the other."""

    arm: Arm
    round: int
    feed: Feed

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.feed.parts(1)[0][1]

    @property
    def wait(self) -> float:
        """Share of the time that was spent waiting for data."""
        return self.feed.parts(1)[0][0]


class Evidence(list[Turn]):
    """All turns, in order of time."""

    def of(self, arm: Arm) -> list[Turn]:
        """Turns of `arm` that were taken in rounds; the last other one if there are none."""
        found = [t for t in self if t.arm == arm]
        return [t for t in found if t.round] or found[-1:]

    def samples(self, arm: Arm) -> tuple[float, ...]:
        """Samples per second, once per turn; a single turn is cut into up to 5 parts."""
        turns = self.of(arm)
        return tuple(t.rate for t in turns) if len(turns) > 1 else turns[0].feed.samples_per_s()

    def rate(self, arm: Arm) -> float:
        """Median samples per second of all turns of `arm`."""
        return statistics.median(t.rate for t in self.of(arm))

    def loaders(self) -> dict[int, float]:
        """Median rate of the loader alone by number of workers, in ascending order."""
        tried = {setting for way, setting in (t.arm for t in self) if way == "loader" and setting == (setting[0], 2)}
        return {s.workers: self.rate(("loader", s)) for s in sorted(tried)}

    def in_turn(self, arms: Sequence[Arm]) -> dict[Arm, list[float]]:
        """Rates in the rounds that have all of `arms`; empty lists if there is none."""
        rounds: dict[int, dict[Arm, float]] = {}
        for t in self:
            if t.round:
                rounds.setdefault(t.round, {})[t.arm] = t.rate
        whole = [r for r in rounds.values() if all(a in r for a in arms)]
        return {a: [r[a] for r in whole] for a in arms}

    def ratio(self, a: Arm, b: Arm) -> Estimate:
        """Rate of `a` over that of `b`, in turn as far as there was time; otherwise of their medians, with DOUBT.

        Anything is possible if one of them was not measured at all.
        """
        pairs = self.in_turn([a, b])
        if not (self.of(a) and self.of(b)):
            return Estimate(1.0, 0.0, math.inf, 0, "x")
        return ratio(pairs[a], pairs[b]) if pairs[a] else ratio([self.rate(a)], [self.rate(b)])


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn what goes wrong inside of the learner's code into one line. Workers send theirs with a whole traceback."""
    try:
        yield
    except BadInput:
        raise
    except Exception as e:
        raise BadInput(f"{what} raised {in_one_line(e)}") from e


UNEQUAL = (
    "stack expects each tensor to be equal size",
    "each element in list of batch should be of equal size",
    "default_collate: batch must contain",
)


def in_one_line(error: Exception) -> str:
    """Type and words of `error`: their first and last line; of a CUDA error the first, the last tells how to debug it.

    A worker sends its error as a traceback in text: the words stand after its last frame.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    if any(line.startswith("Original Traceback") for line in lines):
        last_frame = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=0)
        told = [line for line in lines[last_frame + 1 :] if not line.startswith("    ")] or lines[-1:]
    else:
        first, *rest = lines or [""]
        told = [f"{type(error).__name__}: {first}".removesuffix(": "), *rest]
    whole = len(told) == 1 or "CUDA error" in told[0]
    said = told[0].strip() if whole else f"{told[0].strip()} ... {told[-1].strip()}"
    if any(words in str(error) for words in UNEQUAL):
        said += ": pass the collate_fn of your own DataLoader, from a factory as (dataset, step, {'collate_fn': ...})"
    return said


class Bench:
    """Takes turns of the model alone, the loader alone and both together, until the time is over."""

    def __init__(
        self,
        dataset: Dataset,
        step: Step,
        batch_size: int,
        device: torch.device,
        options: dict[str, Any] | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.dataset, self.user_step, self.device, self.options = dataset, step, device, options or {}
        self.batch_size, self.start, self.deadline, self.round = batch_size, time.perf_counter(), deadline, 0
        self.order = iter(Forever(len(dataset)))  # goes on from turn to turn: no file is in memory because of us
        self.evidence = Evidence()

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent."""
        return time.perf_counter() >= self.start + share * (self.deadline - self.start)

    def step(self, batch: Any) -> None:
        """The learner's step; errors in one line."""
        with blame("step(batch)"):
            self.user_step(batch)

    def first(self) -> None:
        """One batch and two steps on it, whatever they take: the least there is to know."""
        with blame("loading a batch"):
            start = time.perf_counter()
            self.stored = next(iter(endless(self.dataset, 0, self.batch_size, self.order, **self.options)))
            self._note(("loader", Setting(0)), Feed((time.perf_counter() - start,), (0.0,), self.batch_size))
        self.step(self.stored)
        self._note(MODEL, drive(alone(self.stored), self.step, 1, self.device, skip=0, size=self.batch_size))

    def take(self, arm: Arm, batches: int = 0) -> None:
        """One turn, at least half of it timed; nothing is noted if the time is over before all workers delivered."""
        begun, (way, setting) = time.perf_counter(), arm
        common = {"device": self.device, "deadline": self.deadline, "size": self.batch_size, "skip": 0}
        if setting is None:
            common["deadline"] = min(self.deadline, begun + MODEL_SHARE * (self.deadline - self.start))
            drive(alone(self.stored), self.step, 1, **common)
            self._note(arm, drive(alone(self.stored), self.step, 3, least_s=MODEL_TURN_S, **common))
            return
        workers, step = setting.workers, self.step if way == "together" else None
        with blame("loading a batch"):
            options = self.options | {"prefetch_factor": setting.prefetch}
            with running(endless(self.dataset, workers, self.batch_size, self.order, **options)) as source:
                # Batches are taken as soon as there are any: only the first wave differs from those that follow.
                drive(source, step, workers + 1 if workers else 0, **common)
                least_s = max(TURN_S, time.perf_counter() - begun)
                timed = max(2 * workers, 3, batches)
                self._note(arm, drive(source, step, timed, least_s=least_s, wave=max(1, workers), **common))

    def _note(self, arm: Arm, feed: Feed) -> None:
        if len(feed.wait_s) >= feed.wave:
            self.evidence.append(Turn(arm, self.round, feed))

    def in_turn(
        self,
        arms: Sequence[Arm],
        is_clear: Callable[[], bool],
        *,
        fewest: int = FEWEST,
        most: int = MOST_ROUNDS,
        share: float = 1.0,
        batches: int = 0,
    ) -> None:
        """Rounds of all `arms`, until it is clear, `most` are done or that share of the budget is spent."""
        for done, shuffled in enumerate(orders(arms, most)):
            if self.is_over(share) or (done >= fewest and is_clear()):
                return
            self.round += 1
            for arm in shuffled:
                if not self.is_over():
                    self.take(arm, batches)
