"""How far off is the cost model? Published runs: calibrated on one row of each table, held against all the others.

`flop_s`, the FLOP/s that a GPU reaches, is the model's one free number. It is fitted to the calibration row; every
other row of the table is then predicted with it. Shapes, batches and links are those of the sources, or `Table.source`
says whose. What was chosen after the errors had been seen is in `Table.looked` and at `parallel_cost.NEAR`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from labs.parts.planning.parallel_cost import Job, Machine, Plan, cost, shape
from labs.parts.sources import published


@dataclass(frozen=True)
class Run:
    """One published row."""

    name: str
    job: Job
    plan: Plan
    link_bytes_s: float
    """Of one GPU in one direction, by the datasheet."""
    published_s: float
    """Seconds per step."""

    def modelled_s(self, flop_s: float) -> float:
        """Seconds per step by the cost model."""
        return cost(self.job, Machine(self.plan.ranks, float("inf"), flop_s, self.link_bytes_s), self.plan).step_s


@dataclass(frozen=True)
class Table:
    """Runs of one source on one kind of GPU; the first row calibrates."""

    name: str
    gpu: str
    """As in labs/kit/gpus.toml."""
    peak_flop_s: float
    """Dense, of the datasheet, in the format that was used."""
    source: str
    runs: tuple[Run, ...]
    looked: str = ""
    """What was chosen after the ratios of the other rows had been seen: these rows are no test of it."""
    other_link_bytes_s: float = 0.0
    """The link that was not chosen, if the link is what was."""

    @property
    def flop_s(self) -> float:
        """What the GPU reaches, so that the first row comes out as published: the root, by bisection."""
        first, low, high = self.runs[0], 1e12, 1e16
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if first.modelled_s(middle) > first.published_s else (low, middle)
        return high

    def ratios(self) -> dict[str, float]:
        """{row: published over modelled seconds} of the rows that did not calibrate."""
        flop_s = self.flop_s
        return {r.name: r.published_s / r.modelled_s(flop_s) for r in self.runs[1:]}

    def with_other_link(self) -> Table:
        """The same runs over the link that was not chosen."""
        return replace(self, runs=tuple(replace(r, link_bytes_s=self.other_link_bytes_s) for r in self.runs))


def _job(parameters: float, batch: int, seq: int, layers: int = 0, hidden: int = 0, vocabulary: int = 50368) -> Job:
    guessed = shape(parameters)
    return Job(parameters, batch, seq, layers or guessed[0], hidden or guessed[1], vocabulary)


def _megatron() -> Table:
    """Tensor parallel: the model grows with the GPUs."""
    rows = ((1.2e9, 1, 1.288), (2.0e9, 2, 1.242), (4.2e9, 4, 1.357), (8.7e9, 8, 1.508))
    return Table(
        "Megatron-LM, tensor parallel",
        "V100 SXM2",
        125e12,
        "nv-adlr.github.io/MegatronLMV1 (2020), table 1: DGX-2H, batch 8; 1,024 tokens and recomputed activations are "
        "our reading: with them the first row comes within a tenth of the 62.4 TFLOP/s that the page states; shapes "
        "are guessed from the sizes",
        tuple(
            Run(f"{n / 1e9:.1f} B on {g}", _job(n, 8, 1024), Plan(tensor=g, recompute=True), 150e9, s)
            for n, g, s in rows
        ),
    )


GPT3 = {"parameters": 174.6e9, "layers": 96, "hidden": 12288, "vocabulary": 50257}


def _mlperf() -> Table:
    """Pipeline x tensor x data, to a given loss: minutes are turned into seconds per step."""
    found = []
    for row in published.table("mlperf_gpt3"):
        gpus, config = row.case["gpus"], row.config
        plan = Plan(gpus // 32, config["pipeline"], config["tensor"], micro_batches=config["micro_batches"])
        job = _job(batch=plan.data * plan.micro_batches, seq=config["seq"], **GPT3)
        steps = config["tokens"] / (job.batch * job.seq)
        found.append(Run(f"175 B on {gpus:,}", job, plan, 450e9, 60 * row.value / steps))
    return Table(
        "MLPerf GPT-3, pipeline x tensor x data",
        "H100 SXM",
        1979e12,
        "MLPerf Training v3.0, NVIDIA and CoreWeave, from the logs in github.com/mlcommons/training_results_v3.0: "
        "minutes, batch and tokens to the target of the median of three; 8 stages x 4 tensor; FP8",
        tuple(found),
        "the model has one link for all messages. NVLink's 450 GB/s, which tensor parallel uses, was chosen after "
        "the ratios with the 50 GB/s between machines had been seen",
        50e9,
    )


MPT = {  # layers, hidden: scripts/train/yamls of the same repository
    "125m": (125_311_488, 12, 768), "350m": (355_985_408, 24, 1024), "760m": (760_470_528, 24, 1536),
    "1b": (1_315_950_592, 24, 2048), "3b": (2_651_837_440, 32, 2560), "7b": (6_658_859_008, 32, 4096),
    "13b": (12_853_954_560, 40, 5120), "30b": (29_975_214_080, 48, 7168), "70b": (64_862_437_376, 80, 8192),
}  # fmt: skip


def _foundry() -> Table:
    """FSDP of nine sizes on 8 to 128 A100."""
    runs = []
    for row in published.table("llm_foundry"):  # the first calibrates
        name, gpus = row.case["model"], row.case["gpus"]
        batch, tokens_s = row.case["batch"] * gpus, row.value
        parameters, layers, hidden = MPT[name]
        micro, recompute = row.config["micro_batches"], row.config["recompute"]
        plan = Plan(data=gpus, sharded=True, micro_batches=micro, recompute=recompute)
        link = 300e9 if gpus <= 8 else 25e9
        job = _job(parameters, batch, 2048, layers, hidden)
        runs.append(Run(f"{name} on {gpus}", job, plan, link, batch * 2048 / gpus / tokens_s))
    return Table(
        "llm-foundry, FSDP",
        "A100 40GB SXM",
        312e12,
        "github.com/mosaicml/llm-foundry at 061f2c7c, scripts/train/benchmarking/README.md: all rows of A100 40 GB "
        "with 2,048 tokens, 1600 Gb/s per 8; shapes from scripts/train/yamls there; it is our choice that 7b on 8 "
        "calibrates",
        tuple(runs),
    )


def _titan() -> Table:
    """FSDP2 of Llama 3.1 8B on 8 and 128 H100."""
    runs = []
    for gpus, tokens_s in ((8, 5762), (128, 5605)):
        job = _job(8.03e9, 2 * gpus, 8192, 32, 4096, 128256)
        link = 450e9 if gpus <= 8 else 50e9
        runs.append(Run(f"8B on {gpus}", job, Plan(data=gpus, sharded=True), link, 2 * 8192 / tokens_s))
    return Table(
        "torchtitan, FSDP2",
        "H100 SXM",
        989.4e12,
        "github.com/pytorch/torchtitan at 31a17bfd, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, "
        "without torch.compile: H100 of 500 W with HBM2e, whose peak the page does not know, so the share is of an "
        "H100 SXM's; 8,192 tokens as in the repository's llama3_8b.toml; some activations are recomputed, which the "
        "model leaves out",
        tuple(runs),
    )


def _foundry_h100() -> Table:
    """What an H100 of full power reaches in the program that calibrates the A100: one row, so it predicts none."""
    parameters, layers, hidden = MPT["7b"]
    job = _job(parameters, 48, 2048, layers, hidden)
    return Table(
        "llm-foundry on H100, FSDP",
        "H100 SXM",
        989.4e12,
        "github.com/mosaicml/llm-foundry at 061f2c7c, scripts/train/benchmarking/README.md: 7b on 8 H100 80 GB, BF16, "
        "2,048 tokens, one micro-batch of 6, nothing recomputed: its MFU and its HFU are the same 46.44 %",
        (Run("7b on 8", job, Plan(data=8, sharded=True), 450e9, 6 * 2048 / 10643),),
    )


def _foundry_a100() -> Table:
    """The same of an A100 80 GB: 64.23 %, where the 40 GB of the other table recompute, and reach 68 % with that."""
    parameters, layers, hidden = MPT["7b"]
    job = _job(parameters, 96, 2048, layers, hidden)
    return Table(
        "llm-foundry on A100 80GB, FSDP",
        "A100 80GB SXM",
        312e12,
        "github.com/mosaicml/llm-foundry at 061f2c7c, scripts/train/benchmarking/README.md: 7b on 8 A100 80 GB, BF16, "
        "2,048 tokens, two micro-batches of 6, nothing recomputed: its MFU and its HFU are the same 64.23 %",
        (Run("7b on 8", job, Plan(data=8, sharded=True, micro_batches=2), 300e9, 12 * 2048 / 4641),),
    )


@cache
def tables() -> tuple[Table, ...]:
    """All published tables."""
    return _megatron(), _mlperf(), _foundry(), _titan()


@dataclass(frozen=True)
class Band:
    """The range of published over modelled seconds, over all rows that did not calibrate."""

    low: float
    high: float
    rows: int

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"


def band_of(tables: Iterable[Table]) -> Band:
    """Of these tables."""
    ratios = [r for t in tables for r in t.ratios().values()]
    return Band(min(ratios), max(ratios), len(ratios))


@cache
def band() -> Band:
    """Of all tables."""
    return band_of(tables())


def same_model() -> Iterator[float]:
    """Published over modelled seconds if a model's own row with the fewest GPUs calibrates: what scaling adds."""
    for table in tables():
        by_model: dict[str, list[Run]] = {}
        for run in sorted(table.runs, key=lambda r: r.plan.ranks):
            by_model.setdefault(run.name.split(" on ")[0], []).append(run)
        for runs in by_model.values():
            yield from replace(table, runs=tuple(runs)).ratios().values()


SAME_CHIP = {"H200": "H100"}
"""Cards with the peak of another one and more memory: without this, one that is assumed would look slower than it."""


@cache
def reached(gpu: str) -> tuple[float, str] | None:
    """(share of the dense peak, source) that a table's calibration row reaches on this card; None without a table.

    Of products that were really computed, recomputed ones among them: HFU, not MFU. So a plan that recomputes pays for
    it once. Gaps between kernels, the update and waiting, which the scaling model adds, are in it already: it makes a
    row's own step some 2 to 3 % too long. torchtitan's H100 is not asked: it has 500 W, and recomputes what the model
    does not count.
    """
    chip = SAME_CHIP.get(gpu.split()[0], gpu.split()[0])
    own = [t for t in (_foundry_h100(), _foundry_a100(), *tables()) if t.gpu.split()[0] == chip]
    own = [t for t in own if "MLPerf" not in t.name]  # FP8 is another peak
    return (own[0].flop_s / own[0].peak_flop_s, own[0].name) if own else None
