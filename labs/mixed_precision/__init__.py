"""What does each number format do to the time and the memory of a training step?

    python -m labs.mixed_precision --nproc 1                                         # the course's models
    python -m labs.mixed_precision --nproc 1 --models my_package.my_module:factory   # your own
    torchrun --nproc-per-node 1 -m labs.mixed_precision --formats fp32 bf16 --rounds 20

About 10 s on 2 CPU cores. All formats that the device has take turns, in one model after the other; then the bytes
that each keeps for backward, then matrix products by size, where a 16-bit format may overtake FP32 or never does.
What would take longer than its budget is left out, and recorded as such; so is a format that this device does not have
for one of the model's layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from labs.common import models
from labs.common.precision.amp import impossible, scaler, whole_batch_step
from labs.common.timing import probing
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.mixed_precision import amp_effects, matmul_ladder
from labs.mixed_precision.amp_report import saved_shares, short, speed_ups

EAGER_GPT = "labs.common.models.text_models:char_gpt_eager"
ROWS = {"cnn": 8, "char_gpt": 8, EAGER_GPT: 8}  # on a CPU; 64 of other models
GPU_ROWS = 16  # times as many on a GPU, which a small batch leaves idle
PROBE_ROWS = (2, 8)
MODELS_SHARE = 0.75  # of the time; the rest is for matrix products

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """What to run in which formats, and for how long."""

    models: tuple[str, ...] = ("cnn", "char_gpt", EAGER_GPT, "mlp")
    """Of labs.models.MODELS, or package.module:factory. The GPT comes with both kinds of attention."""
    formats: tuple[str, ...] = ()
    """Of fp32, tf32, bf16, fp16; by default all that the device has. fp32 is always among them."""
    batch_size: int = 0
    """Rows per step; 0 takes 8 of the CNN and the GPT and 64 of other models, on a GPU 16 times as many."""
    sides: tuple[int, ...] = ()
    """Sides of the square matrices; by default 32 to 512 on a CPU, 256 to 8192 on a GPU."""
    seconds: float = 3.2
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that each format takes its turn; by default as many as fit into `seconds`, at least 6."""
    least_s: float = 0.002
    """Least duration of a turn: faster steps are repeated."""
    budget_s: float = 2.2
    """A format whose turns would take longer, if there were the fewest, is left out; a matrix product gets a tenth."""
    seed: int = 0
    """Seed of the models and of the data."""
    smoke: bool = False
    """Two rounds, small batches and matrices."""

    def __post_init__(self) -> None:
        unknown = sorted({*self.formats} - {*probing.DTYPES})
        require(not unknown, f"formats may hold {', '.join(probing.DTYPES)}, not {', '.join(unknown)}")
        require(bool(self.models), f"models must name some of {', '.join(models.MODELS)}")
        require(self.batch_size >= 0, f"batch_size must be at least 1 (or 0 for the default), not {self.batch_size}")
        require(all(n >= 1 for n in self.sides), "sides must be at least 1")
        measure.require_budget(self.seconds, self.rounds, least=2)
        require(0 < self.least_s < math.inf, f"least_s must be positive, not {self.least_s}")
        require(0 < self.budget_s < math.inf, f"budget_s must be positive, not {self.budget_s}")
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be built, or has parameters that are not FP32."""
    for name in config.models:
        found = {p.dtype for p in models.build(name).module.parameters()} - {torch.float32}
        kind = str(min(found, key=str)).removeprefix("torch.") if found else ""
        require(not found, f"model {name!r} has {kind} parameters: give it float32 ones, autocast makes the copies")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 measures alone; other ranks wait."""
    if rank.rank == 0:
        formats = device_formats(config, rank.device)
        yield from _everything(config, formats, rank)
    rank.barrier()


def device_formats(config: Config, device: torch.device) -> list[str]:
    """The formats to run, fp32 first. BadInput if one that was asked for is not supported by the device."""
    able = [f for f in probing.DTYPES if probing.supported(f, device)]
    for name in config.formats:
        require(name in able, f"this {device.type} does not support {name}: take formats of {', '.join(able)}")
    return [f for f in able if f == "fp32" or f in (config.formats or able)]


def _everything(config: Config, formats: list[str], rank: Rank) -> Iterator[Record]:
    total = len(config.models) + 1
    for done, name in enumerate(config.models):
        rank.progress(done, total, name)
        yield from model_records(name, config, formats, rank)
    rank.progress(total - 1, total, "matrix products")
    yield from matmul_records(config, formats, rank)


def model_records(name: str, config: Config, formats: list[str], rank: Rank) -> Iterator[Record]:
    """Step times and saved bytes of one model by format."""
    workload = models.make(name, config.seed)
    workload.module.to(rank.device)
    rows = batch_rows(name, config, rank.device)
    batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
    case = {"model": name, "batch": rows}
    steps = {}
    for f in formats:
        if why := impossible(workload.module, workload.loss, batch, f):
            yield rank.record("not_possible", "1", 1.0, rank=0, precision=f, why=why, **case)
            continue
        step = _training(workload, f, rank.device)
        seconds = _step_s(step, batch, rank.device)
        if f == "fp32" or seconds * _fewest(config) <= config.budget_s:
            steps[f] = lambda step=step: step(batch)
        else:
            yield _skipped(rank, seconds, precision=f, **case)
    rounds = measure.rounds_of(config, part=MODELS_SHARE / len(config.models))
    times = matmul_ladder.in_turn(steps, rounds, config.least_s, rank.device)
    for f, samples in times.items():
        yield rank.record("step_s", "s", samples, rank=0, precision=f, **case)
    for f in steps:
        total, copies = amp_effects.saved_bytes(workload, *batch, f)
        yield rank.record("saved_bytes", "B", total, rank=0, precision=f, **case)
        yield rank.record("weight_copy_bytes", "B", copies, rank=0, precision=f, **case)


def batch_rows(name: str, config: Config, device: torch.device) -> int:
    """Rows per step of model `name`."""
    usual = ROWS.get(name, 64) * (1 if device.type == "cpu" else GPU_ROWS)
    return config.batch_size or (2 if config.smoke else usual)


def _fewest(config: Config) -> int:
    """Rounds that will be taken however slow the formats are."""
    return 2 if config.smoke else config.rounds or measure.LEAST_ROUNDS


def _training(workload: models.Workload, name: str, device: torch.device) -> Callable[[Batch], object]:
    """A step of format `name` on a batch. The learning rate is 0: all formats train the same parameters."""
    optimizer, scaling = torch.optim.SGD(workload.module.parameters(), lr=0.0), scaler(name, device)
    return lambda batch: whole_batch_step(name, workload.module, workload.loss, batch, optimizer, scaling)


def _step_s(step: Callable[[Batch], object], batch: Batch, device: torch.device) -> float:
    """Modelled seconds of a step, on the line through those of its first 2 and first 8 rows."""
    rows, (few, more) = len(batch[0]), PROBE_ROWS
    parts = [tuple(t[:n] for t in batch) for n in PROBE_ROWS]
    first, second = (min(measure.time_steps(lambda part=part: step(part), 2, device)) for part in parts)
    return second + max(second - first, 0.0) / (more - few) * max(rows - more, 0)


def _skipped(rank: Rank, seconds: float | Sequence[float], **case: object) -> Record:
    """What was left out: the seconds that each call would take, from smaller ones."""
    why = "its turns would take longer than the budget"
    return rank.record("skipped_step_s", "s", seconds, kind="modelled", rank=0, why=why, **case)


def matmul_records(config: Config, formats: list[str], rank: Rank) -> Iterator[Record]:
    """Square matrix products by side and format; with `casts` those of autocast, which gets FP32 matrices."""
    sides = tuple(sorted(config.sides or matmul_ladder.usual_sides(rank.device)))[: 2 if config.smoke else None]
    rounds, longest_s = measure.rounds_of(config, part=(1 - MODELS_SHARE) / len(sides)), config.budget_s / 10
    climb = matmul_ladder.climb(sides, formats, rounds, config.least_s, longest_s / _fewest(config), rank.device)
    for side, (name, casts), seconds, measured in climb:
        case = {"part": "matmul", "side": side, "precision": name, "casts": casts}
        yield rank.record("step_s", "s", seconds, rank=0, **case) if measured else _skipped(rank, seconds, **case)


def answer(run: Records) -> Iterator[str]:
    """Each format's speed by model, and the size from which its products win."""
    yield from _on_models(run)
    for precision in dict.fromkeys(r.case["precision"] for r in run.where("step_s", casts=True)):
        found = matmul_ladder.ladder(run, precision, casts=True)
        side = matmul_ladder.crossing(found)
        won = f"from side {side} on" if side else "at no size"
        yield (
            f"Square matrix products, casts included, are shown to be faster in {precision.upper()} {won} (tried up "
            f"to {max(found)})."
        )


def _on_models(run: Records) -> Iterator[str]:
    speeds, shares = speed_ups(run), saved_shares(run)
    for precision in dict.fromkeys(name for _, name in speeds):
        told = [
            f"{short(m)} {e}, {_bytes_kept(shares[m, precision])}"
            for (m, name), e in speeds.items()
            if name == precision
        ]
        yield f"Speed of a step in {precision.upper()}, FP32 = 1: {'; '.join(told)}."
    for r in (r for r in run.where("skipped_step_s") if "model" in r.case):
        yield f"{r.case['precision'].upper()} of {short(r.case['model'])} was left out: {r.case['why']}."
    for r in run.where("not_possible"):
        yield f"{r.case['precision'].upper()} of {short(r.case['model'])} is not possible here: {r.case['why']}."


def _bytes_kept(saved_share: float) -> str:
    return f"{100 * abs(saved_share):.0f} % {'fewer' if saved_share >= 0 else 'more'} bytes for backward"
