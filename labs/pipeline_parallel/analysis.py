"""What the records of the pipeline labs say: speed-ups, shares of the ceiling, the fitted cost of a micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from labs.common.pipelines import schedules
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Record, Records

Key = tuple[str, str, int]


def _steps(records: Records, chain: str) -> dict[Key, Record]:
    """Step times of one model, by (schedule, by, micro-batches)."""
    steps = records.where("step_s", chain=chain)
    return {(r.case["schedule"], r.case["by"], r.case["micro_batches"]): r for r in steps}


def _pipelined(records: Records, chain: str) -> dict[Key, Record]:
    return {k: r for k, r in _steps(records, chain).items() if k[0] not in ("single", "copies")}


def speedups(records: Records, chain: str, over: str = "naive") -> dict[Key, Estimate]:
    """Of every pipelined way, paired round by round: how much shorter its step is than that of `over`.

    `over` is "naive" or "single", whose step trains as many rows.
    """
    base = next(r for k, r in _steps(records, chain).items() if k[0] == over)
    return {k: paired_ratio(base.samples, r.samples) for k, r in _pipelined(records, chain).items()}


def shares_of_ceiling(records: Records, chain: str) -> dict[Key, Estimate]:
    """Of every pipelined way: its speed over what this machine allows once the bubble is taken off; 1 is all of it.

    n copies that never talk train n batches in the time t, so without bubble or messages the n ranks would need t/n
    for one; with the bubble (m+p-1)/m times that.
    """
    copies = _steps(records, chain)["copies", "hand", 1]
    p = copies.layout["world_size"]
    return {
        key: paired_ratio([t / p / (1 - schedules.bubble(p, key[2])) for t in copies.samples], r.samples)
        for key, r in _pipelined(records, chain).items()
    }


def best(records: Records, chain: str) -> Key:
    """The pipelined way with the shortest median step."""
    found = {k: r.value for k, r in _pipelined(records, chain).items()}
    return min(found, key=found.__getitem__)


@dataclass(frozen=True)
class Fit:
    """t(m) = (m+p-1) (stage_s/m + per_micro_batch_s), fitted to measured steps."""

    stage_s: float
    per_micro_batch_s: float
    stages: int

    def step_s(self, micro_batches: int) -> float:
        """Seconds of a step."""
        return schedules.step_s(self.stage_s, self.per_micro_batch_s, self.stages, micro_batches)

    def cost_share(self, micro_batches: int) -> float:
        """The cost of a micro-batch relative to what a stage computes for one."""
        return self.per_micro_batch_s * micro_batches / self.stage_s if self.stage_s else math.inf

    @property
    def best_micro_batches(self) -> float:
        """Where the fitted step is shortest; inf if noise hides what a micro-batch costs."""
        return schedules.best_micro_batches(self.stage_s, self.per_micro_batch_s, self.stages)


def fit(records: Records, chain: str) -> Fit:
    """Least squares of the relative error, over the naive split and 1F1B. ValueError for fewer than 2 settings."""
    steps = {k[2]: r for k, r in _steps(records, chain).items() if k[0] in ("naive", "1f1b") and k[1] == "hand"}
    return fit_steps({m: r.value for m, r in steps.items()}, next(iter(steps.values())).layout["world_size"])


def fit_steps(seconds: dict[int, float], stages: int) -> Fit:
    """Fit the model to `{micro-batches: seconds per step}`; no cost comes out negative."""
    from scipy.optimize import nnls  # half a second that ranks need not pay

    if len(seconds) < 2:
        raise ValueError(f"steps with at least two numbers of micro-batches are needed, not {list(seconds)}")
    m, t = np.array(list(seconds), float), np.array(list(seconds.values()), float)
    turns = m + stages - 1
    t = np.maximum(t, 1e-9)  # a clock may be too coarse for a step
    design = np.stack([turns / m, turns], axis=1) / t[:, None]
    stage, cost = nnls(design, np.ones_like(t))[0]
    return Fit(float(stage), float(cost), stages)


@dataclass(frozen=True)
class Idle:
    """Idle share of one setting: the closed form, what was measured, and what a micro-batch costs beside it."""

    schedule: str
    micro_batches: int
    predicted: float
    measured: Estimate
    cost_share: float

    @property
    def error(self) -> float:
        """Measured over predicted, less 1; 0 where nothing was predicted."""
        return self.measured.value / self.predicted - 1 if self.predicted else 0.0


def idle_shares(records: Records, chain: str) -> list[Idle]:
    """One per schedule and number of micro-batches, as timed."""
    fitted, found = fit(records, chain), []
    for r in records.where("idle_share", chain=chain):
        if r.kind != "modelled":
            m = r.case["micro_batches"]
            predicted = schedules.bubble(r.layout["world_size"], m)
            measured = estimate(r.samples, "1")
            found.append(Idle(r.case["schedule"], m, predicted, measured, fitted.cost_share(m)))
    return found


def timeline(records: Records, chain: str, schedule: str, micro_batches: int) -> list[schedules.Event]:
    """The events of a typical measured step, in seconds since its start, for a figure."""
    found = []
    for r in records.where("timeline_s", chain=chain, schedule=schedule, micro_batches=micro_batches):
        pairs = zip(r.case["numbers"], r.samples[::2], r.samples[1::2], strict=True)
        found += [schedules.Event(r.case["stage"], r.case["action"], i, a, b) for i, a, b in pairs]
    return found
