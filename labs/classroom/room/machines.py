"""The same quantity on the room's machines: headlines of each notebook, and everything else as a table.

Compared is what is the same measurement: the same lab, metric, unit and case from the same configuration.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labs.classroom.room.collect import LARGEST, Learner, shown
from labs.classroom.room.questions import machine_of
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Record, Records

RESAMPLES = 999  # of a bootstrap: thousands of intervals are drawn
MAX_ROWS = 40  # of one lab's table


@dataclass(frozen=True)
class Headline:
    """One number of a lab that is worth a figure. `find` raises LookupError or ValueError where a run has it not."""

    notebook: str
    title: str
    label: str
    lab: str
    find: Callable[[Records], Estimate]


@dataclass(frozen=True)
class Measured:
    """A headline's number from one learner's machine; learners are not named: machines are compared, not people."""

    machine: str
    estimate: Estimate


@dataclass(frozen=True)
class Comparison:
    """A headline on all machines that measured it with the configuration that most learners had."""

    title: str
    label: str
    notebook: str
    rows: tuple[Measured, ...]
    left_out: int
    """Learners whose latest run had another configuration"""

    @property
    def machines(self) -> list[str]:
        """Kinds of machines, the slowest number first."""
        groups = defaultdict(list)
        for row in self.rows:
            groups[row.machine].append(row.estimate.value)
        return sorted(groups, key=lambda m: (statistics.median(groups[m]), m))


def _of(r: Record, factor: float, unit: str) -> Estimate:
    return estimate([factor * s for s in r.samples], unit, resamples=RESAMPLES)


def _ratio(a: Record, b: Record) -> Estimate:
    return paired_ratio(a.samples, b.samples, resamples=RESAMPLES)


def _matmul(run: Records) -> Estimate:
    return _of(max(run.where("matmul_flop_s", dtype="fp32"), key=lambda r: r.value), 1e-9, "GFLOP/s")


def _busbw(run: Records) -> Estimate:
    return _of(max(run.where("busbw_b_s"), key=lambda r: r.case["bytes"]), 1e-9, "GB/s")


def _rate_64(run: Records) -> Estimate:
    samples = run.one("step_s", mode="single", batch=64).samples
    return estimate([64 / s for s in samples], "samples/s", resamples=RESAMPLES)


def _sweep(run: Records) -> Estimate:
    return _of(max(run.where("images_per_s", way="sweep"), key=lambda r: r.value), 1, "images/s")


def _ddp(run: Records) -> Estimate:
    if run[0].config.get("model") != "cnn" or run[0].config.get("split") != "weak":
        raise LookupError("another model or split")
    single, ddp = run.one("step_s", mode="single"), max(run.where("step_s", mode="ddp"), key=lambda r: r.case["ranks"])
    return _ratio(single, ddp).scaled(ddp.case["ranks"] * ddp.case["batch_per_rank"] / single.case["batch_per_rank"])


def _all_reduce(run: Records) -> Estimate:
    _ddp(run)
    return _of(run.one("all_reduce_s"), 1e3, "ms")


def _bf16(run: Records) -> Estimate:
    fp32 = run.one("step_s", precision="fp32", model="char_gpt")
    return _ratio(fp32, run.one("step_s", precision="bf16", model="char_gpt", batch=fp32.case["batch"]))


def _recompute(run: Records) -> Estimate:
    steps = run.where("step_s", part="pareto", share=1.0)
    every = max((r for r in steps if r.case["policy"].count(":") == 1), key=lambda r: r.case["segments"])
    return _ratio(every, run.one("step_s", part="pareto", policy="none"))


def _pipeline(run: Records) -> Estimate:
    naive = run.one("step_s", chain="char_gpt", schedule="naive", by="hand")
    return _ratio(naive, run.one("step_s", chain="char_gpt", schedule="1f1b", by="hand", micro_batches=8))


def _fsdp(run: Records) -> Estimate:
    return _ratio(*(run.one("step_s", way=way, model="char_gpt") for way in ("fsdp", "ddp")))


def _anatomy(run: Records) -> Estimate:
    return _of(run.one("busbw_b_s", op="all_reduce"), 1e-9, "GB/s")


def _levels(run: Records) -> Estimate:
    found = {r.case["way"]: r for r in run.where("step_s") if r.kind == "measured"}
    return _ratio(found["hierarchical"], found["flat"])


def _profiler(run: Records) -> Estimate:
    return _ratio(*(run.one("cost_step_s", profiler=name) for name in ("on", "off")))


def _compiled(run: Records) -> Estimate:
    return _ratio(*(run.one("step_s", way=way, backend="inductor") for way in ("compiled", "eager")))


def _compared(run: Records) -> Estimate:
    return _ratio(*(run.one("step_s", every=every) for every in (1, 0)))


def _killed(run: Records) -> Estimate:
    return _of(run.one("lost_s", habit="killed at once"), 1.0, "s")


def _told(run: Records) -> Estimate:
    return _ratio(*(run.one(answer, way="other_size") for answer in ("fooled", "honest")))


def _kept(run: Records) -> Estimate:
    return _of(run.one("gain", patient="slow_loader", cure=FIRST_CURE), 1.0, "x")


FIRST_CURE = "decoded once, kept"


HEADLINES = (
    Headline("00", "FP32 matrix products, best size", "rate (GFLOP/s)", "hardware_probe", _matmul),
    Headline("00", "all-reduce, largest message", "bus bandwidth (GB/s)", "hardware_probe", _busbw),
    Headline("01", "training on one device, batch 64", "samples per second", "batch_size", _rate_64),
    Headline("02", "DataLoader alone, best cell", "images per second", "dataloader", _sweep),
    Headline("03", "speed-up of DDP, CNN, a batch each", "speed-up (x)", "data_parallel", _ddp),
    Headline("03", "all-reduce of the CNN's gradients", "time (ms)", "data_parallel", _all_reduce),
    Headline("04", "BF16 against FP32, step of the GPT", "speed, FP32 = 1 (x)", "mixed_precision", _bf16),
    Headline(
        "05", "every block computed again", "time, nothing recomputed = 1 (x)", "activation_checkpointing", _recompute
    ),
    Headline("06", "pipeline with 8 micro-batches", "speed, naive split = 1 (x)", "pipeline_parallel", _pipeline),
    Headline("06", "FSDP2 against DDP, step of the GPT", "time, DDP = 1 (x)", "fully_sharded", _fsdp),
    Headline("07", "all-reduce of 8 MiB", "bus bandwidth (GB/s)", "all_reduce_anatomy", _anatomy),
    Headline("08", "hierarchical all-reduce of two nodes", "time, flat = 1 (x)", "two_levels", _levels),
    Headline("09", "a step under torch.profiler", "time, without it = 1 (x)", "profile_step", _profiler),
    Headline("09", "a compiled step", "time, eager = 1 (x)", "compiled_step", _compiled),
    Headline("10", "replicas compared in every step", "time, never compared = 1 (x)", "nan_clinic", _compared),
    Headline("10", "a job killed at once, until it is back", "time (s)", "preemption", _killed),
    Headline("11", "exchange of 40 MB, told by the rate of 40 kB", "told over taken (x)", "fooled", _told),
    Headline("12", "images decoded once and kept", "speed, decoded in each step = 1 (x)", "doctor", _kept),
)


def comparisons(learners: list[Learner]) -> list[Comparison]:
    """The headlines that anybody has measured, in the order of the course."""
    return [found for headline in HEADLINES if (found := _compare(headline, learners))]


def _compare(headline: Headline, learners: list[Learner]) -> Comparison | None:
    """Each learner's latest run of the configuration that most of them have; smoke tests only if there is no other."""
    found: dict[str, dict[str, Measured]] = defaultdict(dict)
    for learner in learners:
        for run in learner.runs:
            if run[0].lab == headline.lab and (number := _try(headline.find, run)):
                found[_key(run[0].config)][learner.name] = Measured(_machine(run[0]), number)
    if not found:
        return None
    common = max(found, key=lambda config: ('"smoke": true' not in config, len(found[config]), config))
    others = set().union(*found.values()) - set(found[common])
    rows = sorted(found[common].values(), key=lambda m: m.estimate.value)
    return Comparison(headline.title, headline.label, headline.notebook, tuple(rows), len(others))


@functools.lru_cache(maxsize=8192)  # a watched room is compared again and again; runs are the same objects
def _try(find: Callable[[Records], Estimate], run: Records) -> Estimate | None:
    try:
        found = find(run)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):
        return None
    return found if all(abs(v) < LARGEST for v in (found.value, found.low, found.high)) else None


def _key(values: Any) -> str:
    return json.dumps(values, sort_keys=True)


def _machine(r: Record) -> str:
    ranks = r.layout.get("world_size")
    return machine_of(r.provenance, shown(r.layout.get("device")), ranks if isinstance(ranks, int) else 0)


@dataclass(frozen=True)
class Row:
    """One measurement that at least two learners have: how far their machines are apart."""

    metric: str
    case: str
    unit: str
    learners: int
    low: float
    median: float
    high: float

    @property
    def ratio(self) -> float:
        """Highest over lowest; 1 where all are equal, infinite where only some are 0 or signs differ."""
        if self.low == self.high:
            return 1.0
        return self.high / self.low if self.low > 0 else float("inf")


def tables(learners: list[Learner]) -> dict[str, tuple[list[Row], int]]:
    """{lab: (rows, how many more there are)}: the same measurement by at least two learners, farthest apart first."""
    values: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for learner in learners:
        for r in (r for run in learner.runs for r in run if r.kind == "recorded"):
            values[r.lab, r.metric, r.unit, _key(r.case), _key(r.config), str(r.layout.get("rank"))][learner.name] = r
    labs: dict[str, list[Row]] = defaultdict(list)
    for found in values.values():
        if len(found) > 1:
            labs[next(iter(found.values())).lab].append(_row(list(found.values())))
    return {
        lab: (sorted(rows, key=lambda r: -r.ratio)[:MAX_ROWS], max(0, len(rows) - MAX_ROWS))
        for lab, rows in sorted(labs.items())
    }


def _row(found: list[Record]) -> Row:
    first, numbers = found[0], [r.value for r in found]
    case = ", ".join(f"{k} {v}" for k, v in first.case.items())
    return Row(
        first.metric,
        case if len(case) < 100 else case[:97] + "...",
        first.unit,
        len(numbers),
        min(numbers),
        statistics.median(numbers),
        max(numbers),
    )


def kinds_of_machines(learners: list[Learner]) -> Counter[str]:
    """{machine: learners} by each learner's latest file or preflight."""
    return Counter(m for learner in learners if (m := _latest_machine(learner)))


def _latest_machine(learner: Learner) -> str:
    if learner.preflight and isinstance(learner.preflight.get("machine"), dict) and learner.preflight["machine"]:
        return machine_of(learner.preflight["machine"])
    found = [run.provenance for run in learner.runs[-1:]] + [r["machine"] for r in learner.predictions[-1:]]
    return machine_of(found[0]) if found else ""
