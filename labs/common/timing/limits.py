"""What the probe's records say: the peak of each format, a link's latency and bandwidth, what limits a pass."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from labs.common.timing import collectives
from labs.common.timing.roofline import Work
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Record, Records

FORMATS = {"fp32": "FP32", "tf32": "TF32", "bf16": "BF16", "fp16": "FP16"}
CLEARLY = 2.0  # one limit stands out if it takes so many times the time of the next
WIDE = 10.0  # an interval whose ends are so many times apart tells nothing


def peaks(run: Records) -> dict[str, Record]:
    """The fastest kernel of each format, a matrix product or a convolution: the one peak that everything uses."""
    best: dict[str, Record] = {}
    for r in (*run.where("matmul_flop_s"), *run.where("convolution_flop_s")):
        best[r.case["dtype"]] = max(best.get(r.case["dtype"], r), r, key=lambda r: r.value)
    return {d: best[d] for d in FORMATS if d in best}


def kernel(r: Record) -> str:
    """Which kernel a record of `peaks` timed."""
    return f"a product, n = {r.case['side']}" if "side" in r.case else "a 3x3 convolution"


def memory(run: Records) -> Record:
    """The faster of copy and triad over arrays beyond the caches, in B/s. LookupError without one."""
    rows = run.where("memory_b_s")
    return max(rows, key=lambda r: r.value) if len(rows) else run.one("memory_b_s")


def ratio(a: Record, b: Record) -> Estimate:
    """a / b, not taken in pairs: the interval reaches from the one's low end over the other's high end."""
    x, y = estimate(a.samples), estimate(b.samples)
    return Estimate(x.value / y.value, x.low / y.high, x.high / y.low, min(x.n, y.n), "x")


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: what was measured, and the times that each limit alone would take, in s."""

    name: str
    work: Work
    seconds: Estimate
    limits: dict[str, float]
    """{"arithmetic", "memory", "overhead"}: modelled from counts and from measured rates."""

    @property
    def limit(self) -> str | None:
        """The limit that takes by far the longest; None if none stands out."""
        first, second = sorted(self.limits, key=self.limits.__getitem__, reverse=True)[:2]
        return first if self.limits[first] > CLEARLY * self.limits[second] else None

    @property
    def between(self) -> tuple[str, str]:
        """The two limits that take longest, in the order arithmetic, memory, overhead."""
        shortest = min(self.limits, key=self.limits.__getitem__)
        first, second = (name for name in self.limits if name != shortest)
        return first, second


def modelled(work: Work, flop_s: float, bytes_s: float, operator_s: float) -> dict[str, float]:
    """Seconds that a pass would take if nothing but this one thing took time."""
    return {
        "arithmetic": work.flop / flop_s,
        "memory": work.bytes / bytes_s,
        "overhead": work.operators * operator_s,
    }


def operator_s(run: Records) -> float:
    """Seconds that one operator of a training pass takes when it has next to nothing to compute."""
    return run.one("operator_s", of="pass").value


def passes(run: Records) -> list[Pass]:
    """Every pass that was timed, in the order of the records. LookupError if a limit was not measured."""
    flop_s, bytes_s = peaks(run)["fp32"].value, memory(run).value
    found = []
    for r in run.where("model_flop_s"):
        case = {"model": r.case["model"], "batch_size": r.case["batch_size"]}
        counted = [run.one(f"model_{what}", **case).value for what in ("flop", "bytes", "operators")]
        work = Work(counted[0], counted[1], int(counted[2]))
        seconds = estimate([work.flop / rate for rate in r.samples], "s")
        limits = modelled(work, flop_s, bytes_s, operator_s(run))
        found.append(Pass(pass_name(**case), work, seconds, limits))
    return found


def pass_name(model: str, batch_size: int) -> str:
    """For example "mlp, 64 rows"."""
    return f"{model.rpartition(':')[2]}, {batch_size} row{'s' * (batch_size > 1)}"


@dataclass(frozen=True)
class Link:
    """The fit "latency + size / bandwidth" of an all-reduce, with what the scatter of the samples makes of it."""

    model: collectives.LatencyBandwidth
    ranks: int
    half: Estimate
    """Message size that reaches half of the bandwidth, in KiB; `high` is inf if some resamples show no bandwidth."""
    misfit: float
    """The largest relative distance of a measured median from the fit."""

    @property
    def busbw_b_s(self) -> float:
        """The bandwidth as busbw, in B/s; inf if the fit finds none."""
        return self.model.b_s * collectives.bus_factor("all_reduce", self.ranks)

    @property
    def told(self) -> bool:
        """Whether the run can tell the size to within a factor of WIDE."""
        return self.half.low > 0 and self.half.high < WIDE * self.half.low


def link(run: Records, resamples: int = 200) -> Link:
    """Fit the all-reduce times of `run`, and fit them again for bootstrap samples of every size."""
    import numpy as np

    rows = run.where("all_reduce_s")
    sizes, medians = [r.case["bytes"] for r in rows], [r.value for r in rows]
    model = collectives.fit(sizes, medians)
    random = np.random.default_rng(0)
    again = [
        collectives.fit(sizes, [statistics.median(random.choice(r.samples, len(r.samples))) for r in rows])
        for _ in range(resamples)
    ]
    low, high = np.quantile([f.half_bytes / 1024 for f in again], (0.025, 0.975), method="nearest")
    half = model.half_bytes / 1024
    misfit = max(
        abs(t / model.seconds(s) - 1) if model.seconds(s) else math.inf for s, t in zip(sizes, medians, strict=True)
    )
    interval = Estimate(half, min(half, float(low)), max(half, float(high)), len(rows[0].samples), "KiB")
    return Link(model, rows[0].case["ranks"], interval, misfit)
