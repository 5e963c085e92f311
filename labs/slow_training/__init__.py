"""Why is this training run slow? Buy measurements, name the fault, and see what fixing it gains.

    python -m labs.slow_training --seed 7 --measure shares
    python -m labs.slow_training --seed 7 --fault slow_loader --gain 1.5

About 4 s on 2 CPU cores. The seed draws one fault, or none, without saying which. A measurement costs the seconds that
it takes. If you name the right fault, the lab fixes its line and interleaves steps with and without the fault.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.slow_training import faults
from labs.slow_training.measurements import MEASUREMENTS, Training, in_turn

Measurement = Literal["shares", "operators", "memory", "files", "exchange", "arrivals", "settings"]
STEPS, SEEN_STEPS = 12, 10
MEASURED_S = 1.0
"""Aim for a measurement's steps: slower scripts take fewer of them."""


@dataclass(frozen=True)
class Config:
    """Which fault to draw, what to measure, and your diagnosis."""

    seed: Annotated[int, Interval(ge=0, le=2**31)] = 1
    """Draws the fault."""
    measure: tuple[Measurement, ...] = ()
    """Measurements to buy, in this order."""
    fault: str = ""
    """Your diagnosis: a fault's name, or "healthy"."""
    rounds: Annotated[int, Ge(6)] = 18
    """Rounds in which both scripts take two steps each."""
    smoke: bool = False
    """Take only four steps per measurement, and two rounds."""

    def __post_init__(self) -> None:
        if self.fault:
            faults.require_name(self.fault)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput for a single rank, which would exchange nothing."""
    require(world_size >= 2, f"this training needs 2 ranks or more, not {world_size}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield step times and losses, which are free, then the measurements bought, and what the fix gains."""
    fault = faults.draw(config.seed)
    with tempfile.TemporaryDirectory() as folder:
        make = partial(Training, rank=rank, seed=config.seed, folder=Path(folder))
        sick = partial(make, faults.source(fault))
        training = sick()
        training.go(2 + (4 if config.smoke else SEEN_STEPS))
        yield rank.record("step_s", "s", rank.gather(training.seconds[2:])[0])
        yield rank.record("loss", "", rank.gather(training.losses)[0])
        [step_s] = rank.slowest([sum(training.seconds[2:]) / len(training.seconds[2:])])
        steps = 4 if config.smoke else min(STEPS, max(6, round(MEASURED_S / step_s)))
        for done, name in enumerate(config.measure, 1):
            rank.barrier()
            start = time.perf_counter()
            found = rank.gather(MEASUREMENTS[name](sick, rank, steps))[0]
            [price_s] = rank.slowest([time.perf_counter() - start])
            yield rank.record("price_s", "s", price_s, measurement=name)
            for what, value in found.items():
                yield rank.record("finding", "", value, measurement=name, what=what)
            rank.progress(done, len(config.measure), name)
        if config.fault:
            right = config.fault == fault.name
            told = {"it_was": fault.what, "difference": faults.difference(fault)} if right else {}
            yield rank.record("right", "", float(right), fault=config.fault, **told)
            if right and fault in faults.FAULTS:
                rounds = 2 if config.smoke else config.rounds
                yield rank.record("gain", "x", in_turn(sick(), make(faults.fixed()), rank, rounds), fault=fault.name)


def answer(run: Records) -> Iterator[str]:
    """Yield step time and losses, findings with their prices, and what the fix gained."""
    loss = run.one("loss").samples
    step_s = measure.estimate(run.one("step_s").samples, "s")
    yield f"A step takes {step_s}; the loss went from {loss[0]:.2f} to {loss[-1]:.2f} in {len(loss)} steps."
    for price in run.where("price_s"):
        name = price.case["measurement"]
        found = [f"{r.case['what']} {r.value:.3g}" for r in run.where("finding", measurement=name)]
        yield f"{name} ({price.value:.1f} s): {'; '.join(found)}."
    for r in run.where("right"):
        yield f"{r.case['fault']} is {'right: ' + r.case['it_was'] if r.value else 'wrong'}."
    for r in run.where("gain"):
        yield f"Without the fault it is {measure.estimate(r.samples, 'x')} as fast."
