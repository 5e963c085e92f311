"""The scaling model against published runs: one row of each series calibrates, the others are predicted.

Fixed before anything was fitted or any error of this model was seen:
* A series is one model in one number format, on one machine, with one program, from one source.
* RULE: its smallest configuration calibrates, that is the row with the fewest GPUs, of these the smallest batch. It
  gives one number: the FLOP/s that a GPU reaches. Links come from datasheets, times one share (REACHED) for all of
  them; the gap between kernels and the spread of step times are round numbers of ours; all else is theory.
* HELD_OUT: two rows whose errors are not looked at while the model is built. They are in no error that was printed
  before the model's formulas were final, and they are reported on their own.

Chosen after the first errors had been seen: the second rule, `predict(..., two=True)`, and HARD. No term and no number
of the model was changed for them.

The rows are records, records/published/*.jsonl. What a source does not say and a prediction needs is in CNNS and
`calibration`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas

from labs.common.planning.calibration import GPT3, MPT
from labs.common.planning.parallel_cost import Job, Plan, shape
from labs.common.planning.scaling import (
    INFINITE,
    REACHED,
    Cluster,
    Group,
    Link,
    Step,
    Work,
    all_reduce_s,
    calibrated,
    step,
)
from labs.common.sources.published import table
from labs.kit import hardware
from labs.kit.record import Record, Records

HELD_OUT = (
    {"table": "rtx_3090", "model": "VGG-16", "batch": 128, "gpus": 8},
    {"table": "llm_foundry", "model": "70b", "gpus": 128},
)
STEPS = (
    "one_bit_adam",
    "pytorch_ddp",
    "llm_foundry",
    "torchtitan",
    "nvidia_resnet",
    "megatron",
    "mlperf_gpt3",
    "rtx_3090",
)
"""Tables of training steps that say all that a prediction needs."""
COLLECTIVES = ("nccl_a100", "nccl_b200")
"""Tables of all-reduces by size: the model's communication alone."""
NOT_JUDGED = {
    "pytorch_bert": "neither the model's size, nor its batch, nor the network is stated",
    "rtx_4090_ddp": "neither the batch nor what is trained of the 1.7 billion parameters is stated",
    "rtx_4090_p2p": "one configuration: nothing to predict",
    "huggingface_ddp": "two GPUs alone: no time of one GPU to predict from",
    "powersgd": "compressed gradients: the model has no term for compressing",
    "horovod": "shares of one GPU's rate, which is not stated",
}
"""Why the others are data only."""

# (parameters, 10^9 multiply-adds of a forward pass per image, convolutions): documentation of torchvision.models
HARD = 0.1
"""Perfect scaling errs by more than this on a hard row: there scaling costs something, and a model can be of use."""
CNNS = {"ResNet-50": (25.56e6, 4.09, 53), "ResNet-101": (44.55e6, 7.80, 104), "ResNeXt-50": (25.03e6, 4.23, 53),
        "ResNeXt-101": (88.79e6, 16.41, 104), "VGG-16": (138.36e6, 15.47, 13),
        "Inception-3": (27.16e6, 5.71, 94)}  # fmt: skip
KERNELS_PER_CONVOLUTION = 9  # convolution, normalisation and activation: one kernel forward, two backward each
SGD_BYTES = 20.0  # per parameter: momentum SGD reads three FP32 numbers and writes two


@dataclass(frozen=True)
class Row:
    """One published step, and what the model needs to predict it."""

    table: str
    series: str
    config: str
    work: Work
    cluster: Cluster
    """With flop_s not yet known."""
    plan: Plan
    published_s: float
    held_out: bool = False
    machine: str = ""
    """What the series shares with those of other models: machine, program, number format."""


@dataclass(frozen=True)
class Predicted:
    """A row with what the model says of it."""

    row: Row
    calibrates: bool
    modelled_s: float
    perfect_s: float
    """Had nothing but arithmetic changed since the calibration row: perfect scaling, the model to beat."""
    step: Step | None = None

    @property
    def error(self) -> float:
        """Modelled over published, less 1: positive where the model is too slow."""
        return self.modelled_s / self.row.published_s - 1


def rows() -> list[Row]:
    """All published steps, by table and series."""
    return [r for name in STEPS for r in _rows(name)]


def _rows(name: str) -> list[Row]:
    records = table(name)
    if name == "one_bit_adam":  # its step is the sum of four parts, one after the other
        records = Records(
            replace(r, metric="step", samples=(sum(part.value for part in records.where(**r.case)),))
            for r in records.where("forward")
        )
    return [_row(name, r) for r in records]


def _row(name: str, r: Record) -> Row:
    work, plan = _work(name, r)
    told = {k: v for k, v in r.case.items() if k not in ("gpus", "batch", "ddp")}
    if name == "megatron":  # the model grows with the GPUs: that is the series
        told = {"model": "GPT-2"}
    series = ", ".join(str(v) for v in told.values())
    config = f"{r.case['gpus']} GPUs" + (f", batch {r.case['batch']:g}" if name == "rtx_3090" else "")
    config += f", {r.case['model']}" * (name == "megatron") + ", DDP" * (
        r.case.get("ddp", False) and r.case["gpus"] == 1
    )
    key = {"table": name, **r.case}
    held = any(all(key.get(k) == v for k, v in h.items()) for h in HELD_OUT)
    shared = ", ".join(str(v) for k, v in told.items() if k != "model")
    return Row(name, series, config, work, _cluster(r), plan, _seconds(name, r, work), held, shared)


def _seconds(name: str, r: Record, work: Work) -> float:
    """Published seconds per step."""
    if r.metric == "step":
        return r.value / 1e3
    if r.metric == "tokens_per_gpu":
        return r.case["batch"] * r.config["seq"] / r.value
    if r.metric == "images":
        return work.batch / r.value
    steps = r.config["tokens"] / (work.batch * r.config["seq"])  # to the target
    return 60 * r.value / steps


def _work(name: str, r: Record) -> tuple[Work, Plan]:
    gpus, config = r.case["gpus"], r.config
    if r.case["model"] in CNNS:
        parameters, giga, convolutions = CNNS[r.case["model"]]
        return Work(
            parameters,
            6e9 * giga,
            r.case["batch"] * gpus,
            KERNELS_PER_CONVOLUTION * convolutions,
            convolutions,
            update_bytes=SGD_BYTES,
        ), Plan(data=gpus)
    if name == "one_bit_adam":  # gradients travel in FP16, after backward; sequences of 128
        job = Job(336e6, 16 * gpus, 128, 24, 1024, 30522)
        return replace(Work.of(job), gradient_bytes=2.0, overlap=False), Plan(data=gpus)
    micro, again = config.get("micro_batches", 1), config.get("recompute", False)
    if name == "llm_foundry":  # mode PURE: gradients are summed in BF16, too
        parameters, layers, hidden = MPT[r.case["model"]]
        job = Job(parameters, r.case["batch"] * gpus, config["seq"], layers, hidden, 50368)
        return replace(Work.of(job), gradient_bytes=2.0), Plan(gpus, sharded=True, micro_batches=micro, recompute=again)
    if name == "torchtitan":
        job = Job(8.03e9, r.case["batch"] * gpus, config["seq"], 32, 4096, 128256)
        return Work.of(job), Plan(gpus, sharded=True)
    if name == "megatron":
        parameters = 1e9 * float(r.case["model"].split()[0])
        return Work.of(Job(parameters, 8, config["seq"], *shape(parameters), 50257)), Plan(tensor=gpus, recompute=True)
    data = gpus // (config["tensor"] * config["pipeline"])
    return Work.of(Job(batch=data * micro, seq=config["seq"], **GPT3)), Plan(
        data, config["pipeline"], config["tensor"], micro_batches=micro
    )


def _cluster(r: Record) -> Cluster:
    card = hardware.spec(r.config["card"])
    link = r.config.get("link_gb_s") or card.link_gb_s
    network = r.config.get("network_gb_s")
    between = Link(REACHED * network * 1e9) if network else INFINITE  # without a network there is one node
    return Cluster(
        r.case["gpus"],
        r.config["gpus_per_node"],
        1.0,
        Link(REACHED * link / 2 * 1e9),
        between,
        REACHED * card.bandwidth_gb_s * 1e9,
    )


def predict(rows: Iterable[Row], two: bool = False) -> list[Predicted]:
    """Every row with its prediction; the smallest configuration of each series calibrates.

    `two`: the next larger number of GPUs, with its smallest batch, calibrates the bandwidth of the link that it adds:
    what somebody has who timed one GPU and then two, or one node and then two.
    """
    by_series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_series.setdefault((row.table, row.series), []).append(row)
    return [p for series in by_series.values() for p in _predict_series(series, two)]


def _predict_series(series: list[Row], two: bool) -> list[Predicted]:
    ordered = sorted(series, key=lambda r: (r.cluster.gpus, r.work.batch))  # of equal ones the one that comes first
    first, used = ordered[0], ordered[:1]
    flop_s = calibrated(first.work, first.cluster, first.plan, first.published_s).flop_s
    perfect = calibrated(first.work, _perfect(first.cluster), first.plan, first.published_s).flop_s
    link = {}
    if two and (second := next((r for r in ordered if r.cluster.gpus > first.cluster.gpus), None)):
        link, used = _link(second, flop_s, second.cluster.nodes > first.cluster.nodes), [first, second]
    found = []
    for row in series:
        said = step(row.work, replace(row.cluster, flop_s=flop_s, **link), row.plan)
        ideal = step(row.work, replace(_perfect(row.cluster), flop_s=perfect), row.plan)
        found.append(Predicted(row, row in used, said.step_s, ideal.step_s, said))
    return found


def _link(row: Row, flop_s: float, leaves_node: bool) -> dict[str, Link]:
    """{level: link} with the bandwidth that makes `row` come out as published; empty if none does."""
    level = "between" if leaves_node else "inside"
    given = getattr(row.cluster, level)

    def seconds(bytes_s: float) -> float:
        cluster = replace(row.cluster, flop_s=flop_s, **{level: replace(given, bytes_s=bytes_s)})
        return step(row.work, cluster, row.plan).step_s

    low, high = 1e5, 1e14
    if not seconds(high) < row.published_s < seconds(low):
        return {}
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > row.published_s else (low, middle)
    return {level: replace(given, bytes_s=high)}


def _perfect(cluster: Cluster) -> Cluster:
    """`cluster` with links, memory and ranks that cost nothing."""
    return replace(cluster, inside=INFINITE, between=INFINITE, memory_bytes_s=math.inf, gap_s=0.0, spread=0.0)


@dataclass(frozen=True)
class Band:
    """Published over modelled seconds of the rows that were predicted."""

    low: float
    """A tenth of the rows lies below."""
    high: float
    """A tenth of the rows lies above."""
    median_error: float
    """Median of |modelled / published - 1|."""
    within_20: float
    """Share of rows whose error is at most 20 %."""
    rows: int
    of: str = "one row of the same model"
    """What had calibrated."""

    @classmethod
    def over(cls, ratios: Iterable[float]) -> Band:
        """Of published over modelled seconds."""
        ratios = list(ratios)
        errors = [abs(1 / r - 1) for r in ratios]
        low, high = np.quantile(ratios, [0.1, 0.9])
        return cls(
            float(low), float(high), statistics.median(errors), sum(e <= 0.2 for e in errors) / len(errors), len(ratios)
        )

    def seconds(self, modelled_s: float) -> str:
        """Seconds with the band, for example "2.4 s (2.2 to 3.0)"."""
        return f"{modelled_s:.2g} s ({modelled_s * self.low:.2g} to {modelled_s * self.high:.2g})"

    def efficiency(self, share: float) -> str:
        """A share of what one GPU does, with the band: "98% (61 to 100%)"; waiting longer lowers it, 1 is the most."""
        return f"{share:.0%} ({share / self.high:.0%} to {min(1.0, share / self.low):.0%})"

    def days(self, modelled_s: float) -> str:
        """The same in days."""
        days = modelled_s / 86_400
        return f"{days:.2g} days ({days * self.low:.2g} to {days * self.high:.2g})"

    def __str__(self) -> str:
        return (
            f"Calibrated on {self.of}, the model erred by {self.median_error:.0%} in the median of {self.rows} "
            f"published rows; {self.within_20:.0%} came within 20 %, eight in ten took {self.low:.2f} to "
            f"{self.high:.2f} times its seconds."
        )


@cache
def predictions(two: bool = False) -> tuple[Predicted, ...]:
    """Of all published steps, the two held out among them; `two` as in `predict`."""
    return tuple(predict(rows(), two))


def judged(held_out: bool = False) -> list[Predicted]:
    """Predicted rows that calibrated nothing: those held out, or all others."""
    return [p for p in predictions() if not p.calibrates and p.row.held_out == held_out]


@cache
def band() -> Band:
    """Of all predicted steps: what is told with every answer that a step of the same model calibrated."""
    return Band.over(p.row.published_s / p.modelled_s for p in predictions() if not p.calibrates)


@cache
def band_across() -> Band:
    """What is told with an answer that no step of this model calibrated, but a share of the card's peak.

    The stricter test: one row calibrates all models of a source on one machine, the smallest configuration of all.
    """
    found = predict(replace(r, series=r.machine) for r in rows())
    ratios = (p.row.published_s / p.modelled_s for p in found if not p.calibrates)
    return replace(Band.over(ratios), of="one row of each machine, of whatever model")


def perfect_band() -> Band:
    """The same rows, predicted by perfect scaling."""
    return Band.over(p.row.published_s / p.perfect_s for p in predictions() if not p.calibrates)


def hard_bands() -> tuple[Band, Band]:
    """(the model's, perfect scaling's) band of the HARD rows: those where scaling costs something."""
    hard = [p for p in predictions() if not p.calibrates and abs(p.perfect_s / p.row.published_s - 1) > HARD]
    return (
        Band.over(p.row.published_s / p.modelled_s for p in hard),
        Band.over(p.row.published_s / p.perfect_s for p in hard),
    )


def two_bands() -> tuple[Band, Band]:
    """Hard rows that neither of two calibration rows used: (band with the link calibrated, with one row only)."""
    one = {_key(p.row): p for p in predictions()}
    left = [p for p in predictions(two=True) if not p.calibrates and abs(p.perfect_s / p.row.published_s - 1) > HARD]
    return (
        Band.over(p.row.published_s / p.modelled_s for p in left),
        Band.over(p.row.published_s / one[_key(p.row)].modelled_s for p in left),
    )


def _key(row: Row) -> tuple[str, str, str]:
    return row.table, row.series, row.config


def by_table() -> pandas.DataFrame:
    """Median error and share within 20 % of each table, beside perfect scaling's."""
    found = []
    for name in STEPS:
        its = [p for p in predictions() if p.row.table == name and not p.calibrates]
        own, ideal = (
            Band.over(p.row.published_s / s(p) for p in its) for s in (lambda p: p.modelled_s, lambda p: p.perfect_s)
        )
        found.append(
            {
                "table": name,
                "rows": own.rows,
                "median error": f"{own.median_error:.1%}",
                "within 20 %": f"{own.within_20:.0%}",
                "perfect scaling errs by": f"{ideal.median_error:.1%}",
                "perfect scaling within 20 %": f"{ideal.within_20:.0%}",
            }
        )
    return pandas.DataFrame(found).set_index("table")


def collectives() -> pandas.DataFrame:
    """All-reduces by size: one row of each table calibrates the latency, the others are predicted."""
    found = []
    for name in COLLECTIVES:
        records = list(table(name))
        first = min(records, key=lambda r: (r.case["gpus"], r.case["size"]))
        inside, between = _cluster(first).inside, _cluster(first).between
        n = first.case["gpus"]
        wire = 2 * (n - 1) / n * first.case["size"] / inside.bytes_s
        inside = replace(inside, latency_s=max(0.0, _all_reduce_s(first) - wire) / (2 * (n - 1)))
        for r in records:
            group = Group(r.case["gpus"], r.config["gpus_per_node"])
            modelled = sum(all_reduce_s(r.case["size"], group, inside, between))
            published = _all_reduce_s(r)
            found.append(
                {
                    "table": name,
                    "GPUs": r.case["gpus"],
                    "bytes": r.case["size"],
                    "published us": 1e6 * published,
                    "modelled us": 1e6 * modelled,
                    "error": modelled / published - 1,
                    "calibrates": r is first,
                }
            )
    return pandas.DataFrame(found)


def _all_reduce_s(r: Record) -> float:
    n = r.case["gpus"]
    return r.value / 1e6 if r.metric == "all_reduce" else 2 * (n - 1) / n * r.case["size"] / (1e9 * r.value)


def row_by_row() -> pandas.DataFrame:
    """Every published step, its prediction, its error; the calibration rows and the two held out are marked."""
    found = [
        {
            "table": p.row.table,
            "series": p.row.series,
            "configuration": p.row.config,
            "published s": f"{p.row.published_s:.4g}",
            "modelled s": f"{p.modelled_s:.4g}",
            "error": "calibrates" if p.calibrates else f"{p.error:+.1%}" + " held out" * p.row.held_out,
            "limit": p.step.limit(),
        }
        for p in predictions()
    ]
    return pandas.DataFrame(found).set_index(["table", "series", "configuration"])
