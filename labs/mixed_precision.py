"""Is a training step faster in 16 bits, and is a matrix product?

    python -m labs.mixed_precision --nproc 1
    torchrun --nproc-per-node 1 -m labs.mixed_precision --models my_package.my_module:factory --formats bf16

About 7 s on 2 CPU cores. Interleaves all formats that the device supports: first training steps of each model, then
square matrix products by size, both with matrices already in 16 bits and with FP32 matrices that are cast first, as
autocast does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from labs.common import models
from labs.common.precision.amp import impossible, scaler, tf32, whole_batch_step
from labs.common.timing import probing
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Format = Literal["fp32", "tf32", "bf16", "fp16"]
ROWS = {"cnn": 8, "char_gpt": 8}
"""Rows per step on a CPU; 64 for other models."""
GPU_ROWS = 16
"""Factor for the rows on a GPU, which a small batch would leave idle."""
LEAST = 9
"""Minimum number of rounds; fewer would make wide intervals."""
MODELS_SHARE = 0.75
"""The models' share of the time; the rest is for matrix products."""


@dataclass(frozen=True)
class Config:
    """What to run, in which formats, and for how long."""

    models: tuple[str, ...] = ("cnn", "char_gpt", "mlp")
    """Keys of labs.models.MODELS, or package.module:factory."""
    formats: tuple[Format, ...] = ()
    """Default: all that the device supports. fp32 always runs."""
    batch_size: Annotated[int, Ge(0)] = 0
    """Rows per step. 0: 8 for the CNN and the GPT, 64 for other models; 16 times as many on a GPU."""
    sides: tuple[int, ...] = ()
    """Side lengths of the square matrices. Default: 64 and 256 on a CPU, 256 to 8192 on a GPU."""
    seconds: float = 4.0
    """Total time for all rounds, in s. A slower machine runs fewer rounds (at least 9), so its intervals are wider."""
    rounds: int | None = None
    """Number of rounds; each format takes one turn per round. Default: as many as fit into `seconds`."""
    seed: int = 0
    """Seed of the models and the data."""
    smoke: bool = False
    """Run two rounds with small batches and matrices."""

    def __post_init__(self) -> None:
        require(bool(self.models), f"models must name some of {', '.join(models.MODELS)}")
        require(min(self.sides, default=1) >= 1, "sides must be at least 1")
        measure.require_budget(self.seconds, self.rounds, least=2)
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if a model can't be built, or has parameters that aren't FP32."""
    for name in config.models:
        found = {p.dtype for p in models.build(name).module.parameters()} - {torch.float32}
        kind = str(min(found, key=str)).removeprefix("torch.") if found else ""
        require(not found, f"model {name!r} has {kind} parameters: give it float32 ones, autocast makes the copies")


def training_step(workload: models.Workload, name: Format, batch: tuple, device: torch.device) -> Callable[[], object]:
    """Return an SGD step in the format `name`. With learning rate 0, all formats train the same parameters."""
    optimizer, scaling = torch.optim.SGD(workload.module.parameters(), lr=0.0), scaler(name, device)
    return lambda: whole_batch_step(name, workload.module, workload.loss, batch, optimizer, scaling)


def products(side: int, formats: list[Format], device: torch.device) -> dict[tuple[Format, bool], Callable[[], object]]:
    """Return square matrix products by (format, casts); with casts, they start from FP32 matrices as under autocast."""
    a, b = torch.randn(side, side, device=device), torch.randn(side, side, device=device)
    steps = {(f, False): probing.matmul_step(f, side, device) for f in formats}
    lowered = {f: probing.DTYPES[f] for f in formats if f in ("bf16", "fp16")}
    return steps | {(f, True): lambda t=t: a.to(t) @ b.to(t) for f, t in lowered.items()}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure on rank 0 while the other ranks wait."""
    if rank.rank == 0:
        able = [f for f in probing.DTYPES if probing.supported(f, rank.device)]
        for name in config.formats:
            require(name in able, f"this {rank.device.type} does not support {name}: take some of {', '.join(able)}")
        formats = [f for f in able if f == "fp32" or f in (config.formats or able)]
        yield from _models(config, formats, rank)
        yield from _products(config, formats, rank)
    rank.barrier()


def rounds_of(config: Config, part: float) -> int | measure.Budget:
    """Return 2 in a smoke run, `config.rounds` if given, otherwise what fits into this `part` of the time."""
    return 2 if config.smoke else config.rounds or measure.Budget(part * config.seconds, least=LEAST)


def _models(config: Config, formats: list[Format], rank: Rank) -> Iterator[Record]:
    rounds = rounds_of(config, MODELS_SHARE / len(config.models))
    for done, name in enumerate(config.models):
        rank.progress(done, len(config.models) + 1, name)
        workload = models.make(name, config.seed)
        workload.module.to(rank.device)
        usual = ROWS.get(name, 64) * (1 if rank.device.type == "cpu" else GPU_ROWS)
        rows = config.batch_size or (2 if config.smoke else usual)
        batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
        steps = {}
        for f in formats:
            if why := impossible(workload.module, workload.loss, batch, f):
                yield rank.record("not_possible", "1", 1.0, model=name, precision=f, why=why)
            else:
                steps[f] = training_step(workload, f, batch, rank.device)
        for f, samples in interleaved(steps, rounds, rank.device).items():
            yield rank.record("step_s", "s", samples, rank=0, precision=f, model=name, batch=rows)


def _products(config: Config, formats: list[Format], rank: Rank) -> Iterator[Record]:
    rank.progress(len(config.models), len(config.models) + 1, "matrix products")
    usual = (64, 256) if rank.device.type == "cpu" else (256, 512, 1024, 2048, 4096, 8192)
    sides = (64,) if config.smoke else config.sides or usual
    rounds = rounds_of(config, (1 - MODELS_SHARE) / len(sides))
    for side in sides:
        with tf32(False):  # restores the setting afterwards; the products change it
            found = interleaved(products(side, formats, rank.device), rounds, rank.device)
        for (name, casts), samples in found.items():
            yield rank.record("step_s", "s", samples, rank=0, part="matmul", side=side, precision=name, casts=casts)


def interleaved(
    steps: Mapping, rounds: int | measure.Budget, device: torch.device, least_s: float = 0.002
) -> dict[object, list[float]]:
    """Return seconds per call, one sample per round; calls shorter than `least_s` are repeated."""
    turns, inner = {}, {}
    for name, step in steps.items():
        seconds = min(measure.time_steps(step, 2, device))  # the first call may allocate or compile
        inner[name] = max(1, min(1000, math.ceil(least_s / max(seconds, 1e-7))))
        turns[name] = lambda step=step, n=inner[name]: [step() for _ in range(n)]
    return {name: [s / inner[name] for s in found] for name, found in measure.interleave(turns, rounds, device).items()}


def speedups(records: Records) -> dict[tuple[str, str], Estimate]:
    """Return a model step's speed over FP32's, paired by round, by (model, format)."""
    found = {}
    for r in (r for r in records.where("step_s") if "model" in r.case and r.case["precision"] != "fp32"):
        base = records.one("step_s", model=r.case["model"], precision="fp32")
        found[r.case["model"].rpartition(":")[2], r.case["precision"]] = measure.paired_ratio(base.samples, r.samples)
    return found


def product_speedups(records: Records, name: str, casts: bool) -> dict[int, Estimate]:
    """Return a product's speed over FP32's, by side."""
    found = {}
    for r in records.where("step_s", part="matmul", precision=name, casts=casts):
        base = records.one("step_s", part="matmul", precision="fp32", side=r.case["side"])
        found[r.case["side"]] = measure.paired_ratio(base.samples, r.samples)
    return found


def category(records: Records) -> str:
    """Say whether the GPT's BF16 step is "faster" or "slower" than its FP32 step, or "inconclusive"."""
    ratio = speedups(records)["char_gpt", "bf16"]
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "inconclusive"


def answer(records: Records) -> Iterator[str]:
    """Yield each format's speed by model, and its products' speed by size."""
    found = speedups(records)
    for name in dict.fromkeys(f for _, f in found):
        said = ", ".join(f"{model} {ratio}" for (model, f), ratio in found.items() if f == name)
        yield f"Speed of a training step in {name.upper()}, FP32 = 1: {said}."
    for name in ("bf16", "fp16"):
        said = ", ".join(f"side {n} {ratio}" for n, ratio in product_speedups(records, name, True).items())
        if said:
            yield f"Speed of a matrix product in {name.upper()} with casts, FP32 = 1: {said}."
    for r in records.where("not_possible"):
        yield f"{r.case['precision'].upper()} of {r.case['model']} is not possible here: {r.case['why']}."


if __name__ == "__main__":
    cli.main()
