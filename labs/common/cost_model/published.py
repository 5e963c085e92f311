"""The cost model against published runs: its calibration, its error, and the error band of an answer.

Fixed before we saw any error:

* A series is one model in one number format, on one machine, with one program, from one source.
* Its smallest configuration calibrates: the fewest GPUs, then the smallest batch. It gives one number, the FLOP/s that
  a GPU reaches. Everything else is theory, a datasheet, or a round number of ours.
* HELD_OUT: two rows whose errors nobody saw while building the model. They came out 0 of 2 within 20 %. All other rows
  were seen, so this is a calibrated test, not a blind one.

Chosen after seeing the errors: the regimes, the rules that refuse a band (REGIMES, WIDEST), and NCCL's latencies
instead of one round number. No number was fitted to the errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import pandas

from labs.common.cost_model import cards
from labs.common.cost_model.jobs import Job, Plan
from labs.common.cost_model.seconds import INFINITE, Cluster, Step, Work, calibrated, step
from labs.common.sources.published import table
from labs.kit import hardware
from labs.kit.record import Record

HELD_OUT = (
    {"table": "rtx_3090", "model": "VGG-16", "batch": 128, "gpus": 8},
    {"table": "llm_foundry", "model": "70b", "gpus": 128},
)
STEPS = {
    "one_bit_adam": "BERT, slow networks",
    "pytorch_ddp": "CNNs, V100, DDP",
    "llm_foundry": "GPTs, A100, FSDP",
    "torchtitan": "Llama 8B, H100, FSDP2",
    "nvidia_resnet": "ResNet-50, one node",
    "megatron": "GPT-2, V100, tensor",
    "mlperf_gpt3": "GPT-3, H100",
    "rtx_3090": "CNNs, RTX 3090, PCIe",
}
"""Tables of training steps that contain everything a prediction needs."""
CARDS = "llm_foundry_cards"
"""One row each for two cards: they calibrate a card's share of its peak, and predict nothing."""
FAST_GB_S = 6.25
"""10^9 bytes/s of one GPU to other nodes: no published row lies between 1.6 and this."""
MOST_EXPOSED = 0.25
"""Above this share of exposed communication, all published rows are on slow networks."""
REGIMES = {
    "one GPU": "one GPU",
    "NVLink": "one node with NVLink",
    "PCIe": "one node with PCIe",
    "fast network": f"several nodes with at least {FAST_GB_S:g} GB/s per GPU between them",
    "slow network": f"under {FAST_GB_S:g} GB/s per GPU between nodes, or over {MOST_EXPOSED:.0%} of the step exposed",
}
WIDEST = 2.0
"""A band wider than this (upper end over lower end) is useless, and so is a band from a single source."""
BIAS = "Published runs are the ones that went well, so expect yours to be slower."

# (parameters, 10^9 multiply-adds of a forward pass per image, convolutions): documentation of torchvision.models
CNNS = {"ResNet-50": (25.56e6, 4.09, 53), "ResNet-101": (44.55e6, 7.80, 104), "ResNeXt-50": (25.03e6, 4.23, 53),
        "ResNeXt-101": (88.79e6, 16.41, 104), "VGG-16": (138.36e6, 15.47, 13),
        "Inception-3": (27.16e6, 5.71, 94)}  # fmt: skip
# (parameters, layers, hidden): scripts/train/yamls of github.com/mosaicml/llm-foundry
MPT = {"125m": (125_311_488, 12, 768), "350m": (355_985_408, 24, 1024), "760m": (760_470_528, 24, 1536),
       "1b": (1_315_950_592, 24, 2048), "3b": (2_651_837_440, 32, 2560), "7b": (6_658_859_008, 32, 4096),
       "13b": (12_853_954_560, 40, 5120), "30b": (29_975_214_080, 48, 7168), "70b": (64_862_437_376, 80, 8192),
}  # fmt: skip
GPT3 = (174.6e9, 96, 12288)
KERNELS_PER_CONVOLUTION = 9  # convolution, normalisation and activation: one kernel forward, two backward each
SGD_BYTES = 20.0  # per parameter: momentum SGD reads three FP32 numbers and writes two


@dataclass(frozen=True)
class Row:
    """One published step, and what the model needs to predict it."""

    table: str
    series: str
    machine: str
    """What the series shares with other models' series: machine, program, number format."""
    config: str
    card: str
    work: Work
    cluster: Cluster
    """Without a known flop_s."""
    plan: Plan
    published_s: float
    held_out: bool


def regime(found: Step, cluster: Cluster, plan: Plan) -> str:
    """Return which of REGIMES a modelled step belongs to."""
    if plan.ranks == 1:
        return "one GPU"
    several = plan.ranks > cluster.gpus_per_node
    slow = several and cluster.between.bytes_s < cards.REACHED * 1e9 * FAST_GB_S * (1 - 1e-9)
    if slow or found.exposed_s > MOST_EXPOSED * found.step_s:
        return "slow network"
    return "fast network" if several else "PCIe" if cluster.pcie else "NVLink"


def rows(*tables: str) -> list[Row]:
    """Return the published steps of these tables; by default of all in STEPS."""
    found = []
    for name in tables or STEPS:
        records = table(name)
        if name == "one_bit_adam":  # its step is the sum of four sequential parts
            parts = [(r, [part.value for part in records.where(**r.case)]) for r in records.where("forward")]
            records = [replace(r, metric="step", samples=(sum(values),)) for r, values in parts]
        found += [_row(name, r) for r in records]
    return found


def _row(name: str, r: Record) -> Row:
    work, plan = _work(name, r)
    case = {k: v for k, v in r.case.items() if k not in ("gpus", "batch", "ddp")}
    if name == "megatron":  # the series: the model grows with the number of GPUs
        case = {"model": "GPT-2"}
    config = f"{r.case['gpus']} GPUs" + (f", batch {r.case['batch']:g}" if name == "rtx_3090" else "")
    config += f", {r.case['model']}" * (name == "megatron")
    config += ", DDP" * (r.case.get("ddp", False) and r.case["gpus"] == 1)
    key = {"table": name, **r.case}
    held = any(all(key.get(k) == v for k, v in h.items()) for h in HELD_OUT)
    series, machine = (", ".join(str(v) for k, v in case.items() if k not in without) for without in ((), ("model",)))
    card = hardware.spec(r.config["card"])
    stated = cards.REACHED * r.config.get("link_gb_s", 0) / 2
    network = r.config.get("network_gb_s", 0)
    cluster = cards.cluster(card, r.case["gpus"], r.config["gpus_per_node"], network, 1.0, stated)
    return Row(name, series, machine, config, card.gpu, work, cluster, plan, _seconds(r, work), held)


def _seconds(r: Record, work: Work) -> float:
    """Return published seconds per step."""
    if r.metric == "step":
        return r.value / 1e3
    if r.metric == "tokens_per_gpu":
        return r.case["batch"] * r.config["seq"] / r.value
    if r.metric == "images":
        return work.batch / r.value
    return 60 * r.value / (r.config["tokens"] / (work.batch * r.config["seq"]))  # minutes to the target, over steps


def _work(name: str, r: Record) -> tuple[Work, Plan]:
    gpus, config, model = r.case["gpus"], r.config, r.case["model"]
    micro, again, seq = config.get("micro_batches", 1), config.get("recompute", False), config.get("seq", 0)
    if model in CNNS:
        parameters, giga, convolutions = CNNS[model]
        kernels = KERNELS_PER_CONVOLUTION * convolutions
        batch = r.case["batch"] * gpus
        return Work(parameters, 6e9 * giga, batch, kernels, convolutions, update_bytes=SGD_BYTES), Plan(gpus)
    if name == "one_bit_adam":  # gradients travel in FP16, after backward; sequences of 128
        work = Work.of(Job(336e6, 16 * gpus, 128, 24, 1024))
        return replace(work, gradient_bytes=2.0, overlap=False), Plan(gpus)
    if name in ("llm_foundry", CARDS):  # mode PURE sums gradients in BF16
        parameters, layers, hidden = MPT[model]
        work = Work.of(Job(parameters, r.case["batch"] * gpus, seq, layers, hidden))
        return replace(work, gradient_bytes=2.0), Plan(gpus, sharded=True, micro_batches=micro, recompute=again)
    if name == "torchtitan":
        return Work.of(Job(8.03e9, r.case["batch"] * gpus, seq, 32, 4096)), Plan(gpus, sharded=True)
    if name == "megatron":
        return Work.of(Job.of(1e9 * float(model.split()[0]), 8, seq)), Plan(tensor=gpus, recompute=True)
    data = gpus // (config["tensor"] * config["pipeline"])
    parameters, layers, hidden = GPT3
    plan = Plan(data, config["pipeline"], config["tensor"], micro_batches=micro)
    return Work.of(Job(parameters, data * micro, seq, layers, hidden)), plan


def predict(published: Iterable[Row], by: Literal["series", "machine"]) -> pandas.DataFrame:
    """Predict every row, calibrated by one row of its series, or of its machine, whatever model that ran.

    "machine" corresponds to using a card's share of peak from another model. `perfect_s` is perfect scaling, the model
    to beat: as if only arithmetic had changed since the calibration row.
    """
    sets: dict[tuple[str, str], list[Row]] = {}
    for row in published:
        sets.setdefault((row.table, getattr(row, by)), []).append(row)
    found = pandas.DataFrame([line for rows in sets.values() for line in _predict(rows)])
    found["error"] = found["modelled_s"] / found["published_s"] - 1  # positive: the model is too slow
    return found


def _predict(rows: list[Row]) -> Iterator[dict]:
    first = min(rows, key=lambda r: (r.cluster.gpus, r.work.batch))  # the first one of equals
    flop_s = calibrated(first.work, first.cluster, first.plan, first.published_s).flop_s
    perfect = calibrated(first.work, _perfect(first.cluster), first.plan, first.published_s).flop_s
    for row in rows:
        modelled = step(row.work, replace(row.cluster, flop_s=flop_s), row.plan)
        ideal = step(row.work, replace(_perfect(row.cluster), flop_s=perfect), row.plan)
        yield {
            "table": row.table,
            "series": row.series,
            "configuration": row.config,
            "regime": regime(modelled, row.cluster, row.plan),
            "held_out": row.held_out,
            "calibrates": row is first,
            "published_s": row.published_s,
            "modelled_s": modelled.step_s,
            "perfect_s": ideal.step_s,
        }


def _perfect(cluster: Cluster) -> Cluster:
    """Return `cluster` with links, memory and ranks that cost nothing."""
    return replace(cluster, inside=INFINITE, between=INFINITE, memory_bytes_s=float("inf"), gap_s=0.0, spread=0.0)


@cache
def test() -> pandas.DataFrame:
    """Run the calibrated test: every row that didn't calibrate, by series, the two held-out rows first."""
    found = predict(rows(), by="series")
    return found[~found["calibrates"]].sort_values("held_out", ascending=False, kind="stable", ignore_index=True)


@dataclass(frozen=True)
class Range:
    """A modelled number with its band, which contains eight in ten published runs of the regime."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """Multiply all three by `factor`."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        value, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Band:
    """Published over modelled seconds in one regime; each row is predicted from one row of its machine."""

    regime: str
    low: float
    """The lower 10 % of the rows are below this."""
    high: float
    """The upper 10 % of the rows are above this."""
    rows: int
    sources: int

    @property
    def refusal(self) -> str:
        """Why this band is useless, in one line; "" if it isn't."""
        useful = self.sources > 1 and self.high <= WIDEST * self.low
        return "" if useful else f"no time, because published runs support no band for {self}; time a step."

    def __str__(self) -> str:
        return (
            f"{REGIMES[self.regime]} (eight in ten of {self.rows} published runs from {self.sources} "
            f"source{'s' * (self.sources > 1)} took {self.low:.2f} to {self.high:.2f} times the modelled seconds)"
        )


@cache
def bands() -> dict[str, Band]:
    """Return {regime: its band} over all rows that didn't calibrate, including the two held-out ones."""
    found = predict(rows(), by="machine")
    groups = found[~found["calibrates"]].groupby("regime")
    ratio = {name: g["published_s"] / g["modelled_s"] for name, g in groups}
    return {
        name: Band(name, *ratio[name].quantile([0.1, 0.9]), len(g), g["table"].nunique())
        for name, g in ((name, groups.get_group(name)) for name in REGIMES)
    }


@dataclass(frozen=True)
class Estimate:
    """A modelled step of a plan with its error band, or the reason why no time is given."""

    step: Step
    band: Band
    refusal: str

    @property
    def seconds(self) -> Range | None:
        """Seconds per step; None if the published rows support no band."""
        s = self.step.step_s
        return None if self.refusal else Range(s, self.band.low * s, self.band.high * s)

    def __str__(self) -> str:
        return f"Time: {self.seconds} s per step, for {self.band}. {BIAS}" if self.seconds else f"N{self.refusal[1:]}"


def estimate(work: Work, cluster: Cluster, plan: Plan, calibration: str) -> Estimate:
    """Model one step with its regime's band. `calibration`: where flop_s comes from; "" for a guess."""
    found = step(work, cluster, plan)
    band = bands()[regime(found, cluster, plan)]
    return Estimate(found, band, band.refusal if calibration else GUESSED)


SAME_CHIP = {"H200": "H100"}
"""Cards with another card's peak and more memory."""
GUESS = 0.4
"""Share of the peak assumed for a card without a published run, to compare plans; no time is printed for it."""
GUESSED = "no time, because no published run says what share of its peak this card reaches; time a step."


@cache
def reached(card: str) -> tuple[float, str]:
    """Return (share of its dense 16-bit peak that this card reaches, source); (GUESS, "") without a published run.

    Counts products really computed, including recomputed ones, so a plan that recomputes pays for it once.
    """
    chip = SAME_CHIP.get(card.split()[0], card.split()[0])
    for row in rows(CARDS, "megatron"):  # the first row of each card counts
        if row.card.split()[0] == chip:
            flop_s = calibrated(row.work, row.cluster, row.plan, row.published_s).flop_s
            peak = cards.peak_flop_s(hardware.spec(row.card))
            return flop_s / peak, f"{row.series} on {row.config}, records/published/{row.table}.jsonl"
    return GUESS, ""


def report() -> pandas.DataFrame:
    """Return one row per regime: the calibrated test, and the band of an answer."""
    found = test().assign(
        perfect=lambda t: (t["perfect_s"] / t["published_s"] - 1).abs(), off=lambda t: t["error"].abs()
    )
    lines = found.groupby("regime").agg(
        rows=("off", "size"),
        within_20_percent=("off", lambda e: f"{(e <= 0.2).sum()} of {len(e)}"),
        median_error=("off", lambda e: f"{e.median():.0%}"),
        perfect_scaling=("perfect", lambda e: f"{e.median():.0%}"),
    )
    lines["band"] = ["refused" if b.refusal else f"{b.low:.2f} to {b.high:.2f}" for b in map(bands().get, lines.index)]
    return lines.loc[list(REGIMES)]
