"""The cost model against published runs: what calibrates it, how far off it is, and which error band an answer gets.

Fixed before any error was seen:
* A series is one model in one number format, on one machine, with one program, from one source.
* Its smallest configuration calibrates: the fewest GPUs, of these the smallest batch. It gives one number, the FLOP/s
  that a GPU reaches. Everything else is theory, a datasheet, or a round number of ours.
* HELD_OUT: two rows whose errors nobody looked at while the model was built. They came out 0 of 2 within 20 %.
  All other rows were seen while it was built: this is a calibrated test, not a blind one.

Chosen after the errors had been seen: the regimes and the rules that refuse a band (REGIMES, WIDEST), and NCCL's own
latencies in place of one round number. No number was fitted to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
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
"""Tables of training steps that say all that a prediction needs."""
CARDS = "llm_foundry_cards"
"""One row each for two cards: they calibrate a card's share of its peak, and predict nothing."""
NOT_PREDICTED = {
    "pytorch_bert": "neither the model's size, nor its batch, nor the network is stated",
    "rtx_4090_ddp": "neither the batch nor what is trained of the 1.7 billion parameters is stated",
    "rtx_4090_p2p": "one configuration: nothing to predict",
    "huggingface_ddp": "only two GPUs: no time of one GPU to predict from",
    "powersgd": "compressed gradients: the model has no term for compressing",
    "horovod": "shares of one GPU's rate, which is not stated",
    "nccl_a100": "all-reduces, not training steps",
    "nccl_b200": "all-reduces, not training steps",
}
FAST_GB_S = 6.25
"""10^9 bytes/s of one GPU to other nodes: no published row lies between 1.6 and this."""
MOST_EXPOSED = 0.25
"""Beyond this share of exposed communication all published rows are those of the slow networks."""
REGIMES = {
    "one GPU": "one GPU",
    "NVLink": "one node with NVLink",
    "PCIe": "one node with PCIe",
    "fast network": f"several nodes, at least {FAST_GB_S:g} GB/s per GPU between them",
    "slow network": f"several nodes with less than that, or over {MOST_EXPOSED:.0%} of the step exposed communication",
}
WIDEST = 2.0
"""A band whose upper end is more than this times its lower end helps nobody; nor does a band from a single source."""
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
    """What the series shares with those of other models: machine, program, number format."""
    config: str
    card: str
    work: Work
    cluster: Cluster
    """With flop_s not yet known."""
    plan: Plan
    published_s: float
    held_out: bool


@dataclass(frozen=True)
class Predicted:
    """A row with what the model says of it."""

    row: Row
    calibrates: bool
    step: Step
    perfect_s: float
    """If nothing but arithmetic had changed since the calibration row: perfect scaling, the model to beat."""

    @property
    def error(self) -> float:
        """Modelled over published, less 1: positive where the model is too slow."""
        return self.step.step_s / self.row.published_s - 1

    @property
    def ratio(self) -> float:
        """Published over modelled seconds."""
        return self.row.published_s / self.step.step_s

    @property
    def regime(self) -> str:
        """The regime of the row by its links and its modelled step."""
        return regime(self.step, self.row.cluster, self.row.plan)


def regime(found: Step, cluster: Cluster, plan: Plan) -> str:
    """Which of REGIMES a modelled step belongs to."""
    if plan.ranks == 1:
        return "one GPU"
    several = plan.ranks > cluster.gpus_per_node
    slow = several and cluster.between.bytes_s < cards.REACHED * 1e9 * FAST_GB_S * (1 - 1e-9)
    if slow or found.exposed_share > MOST_EXPOSED:
        return "slow network"
    return "fast network" if several else "PCIe" if cluster.pcie else "NVLink"


@cache
def rows() -> tuple[Row, ...]:
    """All published steps, by table and series."""
    return tuple(r for name in STEPS for r in _rows(name))


def _rows(name: str) -> list[Row]:
    records = table(name)
    if name == "one_bit_adam":  # its step is the sum of four parts, one after the other
        total = lambda r: sum(part.value for part in records.where(**r.case))  # noqa: E731
        records = [replace(r, metric="step", samples=(total(r),)) for r in records.where("forward")]
    return [_row(name, r) for r in records]


def _row(name: str, r: Record) -> Row:
    work, plan = _work(name, r)
    case = {k: v for k, v in r.case.items() if k not in ("gpus", "batch", "ddp")}
    if name == "megatron":  # the model grows with the GPUs: that is the series
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
    """Published seconds per step."""
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
    if name in ("llm_foundry", CARDS):  # mode PURE: gradients are summed in BF16
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


def predict(published: Iterable[Row], by: Literal["series", "machine"] = "series") -> list[Predicted]:
    """Every row with its prediction, calibrated by one row of its series, or of its machine, whatever model that ran.

    "machine" is what you ask of the model when a card's share of its peak comes from another model.
    """
    sets: dict[tuple[str, str], list[Row]] = {}
    for row in published:
        sets.setdefault((row.table, getattr(row, by)), []).append(row)
    return [p for rows in sets.values() for p in _predict(rows)]


def _predict(rows: list[Row]) -> list[Predicted]:
    first = min(rows, key=lambda r: (r.cluster.gpus, r.work.batch))  # of equal ones the one that comes first
    flop_s = calibrated(first.work, first.cluster, first.plan, first.published_s).flop_s
    perfect = calibrated(first.work, _perfect(first.cluster), first.plan, first.published_s).flop_s
    found = []
    for row in rows:
        modelled = step(row.work, replace(row.cluster, flop_s=flop_s), row.plan)
        ideal = step(row.work, replace(_perfect(row.cluster), flop_s=perfect), row.plan)
        found.append(Predicted(row, row is first, modelled, ideal.step_s))
    return found


def _perfect(cluster: Cluster) -> Cluster:
    """`cluster` with links, memory and ranks that cost nothing."""
    return replace(cluster, inside=INFINITE, between=INFINITE, memory_bytes_s=float("inf"), gap_s=0.0, spread=0.0)


@cache
def test() -> tuple[Predicted, ...]:
    """The calibrated test, by series: the two held-out rows first, then all others that calibrated nothing."""
    predicted = (p for p in predict(rows()) if not p.calibrates)
    return tuple(sorted(predicted, key=lambda p: not p.row.held_out))


@dataclass(frozen=True)
class Range:
    """A modelled number with its band: eight in ten published runs of the regime lie within."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """All three, `factor` times."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        value, low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in (self.value, self.low, self.high))
        return f"{value} ({low} to {high})"


@dataclass(frozen=True)
class Band:
    """Published over modelled seconds of the rows of one regime, each predicted from one row of its machine."""

    regime: str
    low: float
    """A tenth of the rows lies below."""
    high: float
    """A tenth of the rows lies above."""
    median_error: float
    """Median of |modelled / published - 1|."""
    within_20: float
    """Share of rows whose error is at most 20 %."""
    rows: int
    sources: int

    @property
    def refusal(self) -> str:
        """Why this band helps nobody, in one line; "" if it does."""
        if self.sources > 1 and self.high <= WIDEST * self.low:
            return ""
        return (
            f"none given for {REGIMES[self.regime]}: its {self.rows} published rows ({_count(self.sources)}) took "
            f"{self.low:.2g} to {self.high:.2g} times the modelled seconds. Time a step on your machines."
        )

    def range(self, value: float) -> Range:
        """`value`, a time, with the band."""
        return Range(value, self.low * value, self.high * value)

    def __str__(self) -> str:
        return (
            f"{REGIMES[self.regime]}: eight in ten of {self.rows} published rows ({_count(self.sources)}) took "
            f"{self.low:.2f} to {self.high:.2f} times the modelled seconds. {BIAS}"
        )


def _count(sources: int) -> str:
    return f"{sources} source" + "s" * (sources > 1)


@cache
def bands() -> dict[str, Band]:
    """{regime: its band}, over all rows that calibrated nothing, the two held out among them."""
    predicted = [p for p in predict(rows(), by="machine") if not p.calibrates]
    return {name: _band(name, [p for p in predicted if p.regime == name]) for name in REGIMES}


def _band(name: str, predicted: list[Predicted]) -> Band:
    errors = [abs(p.error) for p in predicted]
    low, high = np.quantile([p.ratio for p in predicted], [0.1, 0.9])
    within = sum(e <= 0.2 for e in errors) / len(errors)
    sources = len({p.row.table for p in predicted})
    return Band(name, float(low), float(high), statistics.median(errors), within, len(errors), sources)


@dataclass(frozen=True)
class Estimate:
    """A modelled step of a plan, and its seconds with their band, or the reason why there are none."""

    step: Step
    band: Band
    refusal: str

    @property
    def seconds(self) -> Range | None:
        """Seconds per step; None if the published rows support no band."""
        return None if self.refusal else self.band.range(self.step.step_s)

    def __str__(self) -> str:
        return f"{self.seconds} s per step. For {self.band}" if self.seconds else self.refusal


def estimate(work: Work, cluster: Cluster, plan: Plan, calibration: str) -> Estimate:
    """One step with the band of its regime. `calibration`: where flop_s comes from; "" if it is a guess."""
    found = step(work, cluster, plan)
    band = bands()[regime(found, cluster, plan)]
    return Estimate(found, band, band.refusal if calibration else GUESSED)


SAME_CHIP = {"H200": "H100"}
"""Cards with the peak of another one and more memory."""
GUESS = 0.4
"""Share of the peak that we assume for a card without a published run, to compare plans; no time is printed for it."""
GUESSED = "none given: no published run says what share of its peak this card reaches. Time a step."


@cache
def reached(card: str) -> tuple[float, str]:
    """(share of its dense 16-bit peak that this card reaches, source); (GUESS, "") without a published run.

    Of products that were really computed, recomputed ones among them: so a plan that recomputes pays for it once.
    """
    chip = SAME_CHIP.get(card.split()[0], card.split()[0])
    for row in (*_rows(CARDS), *_rows("megatron")[:1]):
        if row.card.split()[0] == chip:
            flop_s = calibrated(row.work, row.cluster, row.plan, row.published_s).flop_s
            peak = cards.peak_flop_s(hardware.spec(row.card))
            return flop_s / peak, f"{row.series} on {row.config}, records/published/{row.table}.jsonl"
    return GUESS, ""


def report() -> pandas.DataFrame:
    """One row per regime: the calibrated test by series, and the band that its answers get."""
    found = []
    for name, band in bands().items():
        its = [p for p in test() if p.regime == name]
        off = statistics.median(abs(p.error) for p in its)
        perfect = statistics.median(abs(p.perfect_s / p.row.published_s - 1) for p in its)
        found.append(
            {
                "regime": name,
                "rows": len(its),
                "within 20 %": f"{sum(abs(p.error) <= 0.2 for p in its)} of {len(its)}",
                "median error": f"{off:.0%}",
                "perfect scaling's": f"{perfect:.0%}",
                "band": "refused" if band.refusal else f"{band.low:.2f} to {band.high:.2f}",
            }
        )
    return pandas.DataFrame(found).set_index("regime")
