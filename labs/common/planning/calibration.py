"""The FLOP/s that a GPU reaches, by published runs: the cost model's one free number.

It is fitted to the first row of each table. Shapes, batches and links are those of the sources, or `Table.source`
says whose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from labs.common.planning.parallel_cost import Job, Machine, Plan, cost, shape


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
    """Runs of one source on one kind of GPU; the first one calibrates."""

    name: str
    gpu: str
    """As in labs/kit/gpus.toml."""
    peak_flop_s: float
    """Dense, of the datasheet, in the format that was used."""
    source: str
    runs: tuple[Run, ...]

    @property
    def flop_s(self) -> float:
        """What the GPU reaches, so that the first row comes out as published: the root, by bisection."""
        first, low, high = self.runs[0], 1e12, 1e16
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if first.modelled_s(middle) > first.published_s else (low, middle)
        return high


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


MPT = {  # layers, hidden: scripts/train/yamls of the same repository
    "125m": (125_311_488, 12, 768), "350m": (355_985_408, 24, 1024), "760m": (760_470_528, 24, 1536),
    "1b": (1_315_950_592, 24, 2048), "3b": (2_651_837_440, 32, 2560), "7b": (6_658_859_008, 32, 4096),
    "13b": (12_853_954_560, 40, 5120), "30b": (29_975_214_080, 48, 7168), "70b": (64_862_437_376, 80, 8192),
}  # fmt: skip


def _foundry_h100() -> Table:
    """An H100 of full power."""
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
    """The same of an A100 80 GB."""
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


SAME_CHIP = {"H200": "H100"}
"""Cards with the peak of another one and more memory: without this, one that is assumed would look slower than it."""


@cache
def reached(gpu: str) -> tuple[float, str] | None:
    """(share of the dense peak, source) that a table's calibration row reaches on this card; None without a table.

    Of products that were really computed, recomputed ones among them: HFU, not MFU. So a plan that recomputes pays for
    it once. Gaps between kernels, the update and waiting, which the scaling model adds, are in it already: it makes a
    row's own step some 2 to 3 % too long.
    """
    chip = SAME_CHIP.get(gpu.split()[0], gpu.split()[0])
    own = [t for t in (_foundry_h100(), _foundry_a100(), _megatron()) if t.gpu.split()[0] == chip]
    return (own[0].flop_s / own[0].peak_flop_s, own[0].name) if own else None
