"""What does GradScaler do, and what does each common mistake look like from outside?

    python -m labs.loss_scaling --nproc 1
    torchrun --nproc-per-node 1 -m labs.loss_scaling --cases right "clip before unscale_" --init-scale 65536

About 3 s on 2 CPU cores. A small model trains in FP16, starting from too large a scale. All cases use the same batches;
each but the first contains one mistake. The run counts signs visible from outside, and compares the weights with an
FP32 run on the batches that the right case did not skip.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Case = Literal[
    "right",
    "clip before unscale_",
    "unscale_ per micro-batch",
    "new scaler every step",
    "no zero_grad",
    "scheduler always",
    "optimizer.step",
]
MICRO_BATCHES, GROWTH_INTERVAL = 2, 6
TOLERANCE = 4 * 2.0**-11
"""Largest accepted distance from FP32's weights, relative to how far those moved: a few FP16 roundings."""


@dataclass(frozen=True)
class Config:
    """Which cases, and for how long."""

    cases: tuple[Case, ...] = Case.__args__
    """Cases to train: "right" is correct, each of the others contains one mistake."""
    steps: Annotated[int, Ge(1)] = 20
    """Steps of each case."""
    rows: Annotated[int, Ge(1)] = 8
    """Rows of a micro-batch; a step takes two."""
    max_norm: Annotated[float, Gt(0)] = 4.0
    """Clip gradients to this norm."""
    init_scale: Annotated[float, Gt(0)] = 2.0**24
    """The initial scale. GradScaler's default is 65,536."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Has no effect: the run is short anyway."""

    def __post_init__(self) -> None:
        require(self.cases[:1] == ("right",), "cases must start with right: it is the baseline")


def perceptron() -> nn.Module:
    """Build 256-128-10 with GELU. Rounding can flip a ReLU, which would hide the mistakes; GELU is smooth."""
    return nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 10))


def make_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Draw random rows, and labels that a model can learn."""
    x = torch.randn(rows, 256)
    return x, x[:, :100].reshape(rows, 10, 10).sum(2).argmax(1)


@dataclass
class Seen:
    """What a case did, step by step."""

    scale: list[float] = field(default_factory=list)
    """Scale before each step."""
    skipped: list[bool] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    """The norm that clip_grad_norm_ returned."""
    lr: float = 0.0
    """The learning rate at the end."""
    warned: int = 0
    """Number of warnings that PyTorch issued."""


def start(config: Config, rank: Rank) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return a new model, its optimizer, and a scheduler that lowers the learning rate with each step."""
    torch.manual_seed(config.seed)
    model = perceptron().to(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.steps)


def train(case: Case, batches: list[list[tuple[Tensor, Tensor]]], config: Config, rank: Rank) -> tuple[Seen, nn.Module]:
    """Train in FP16 with accumulation and clipping. Every mistake is on the lines that name its case."""
    model, optimizer, scheduler = start(config, rank)
    scaler, seen, steps = GradScaler(rank.device.type, config.init_scale, growth_interval=GROWTH_INTERVAL), Seen(), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for micro_batches in batches:
        if case == "new scaler every step":
            scaler = GradScaler(rank.device.type, config.init_scale, growth_interval=GROWTH_INTERVAL)
        seen.scale.append(scaler.get_scale())
        taken = len(steps)
        if case != "no zero_grad":
            optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches):
            with torch.autocast(rank.device.type, torch.float16):
                loss = cross_entropy(model(x), y) / len(micro_batches)
            scaler.scale(loss).backward()
            if case == "unscale_ per micro-batch" and i + 1 < len(micro_batches):
                scaler.unscale_(optimizer)
                scaler.update()  # without it, the next unscale_ raises
        if case != "clip before unscale_":
            scaler.unscale_(optimizer)
        seen.norm.append(clip_grad_norm_(model.parameters(), config.max_norm).item())
        if case == "optimizer.step":
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
        seen.skipped.append(len(steps) == taken)
        if case == "scheduler always" or not seen.skipped[-1]:
            scheduler.step()
    seen.lr = optimizer.param_groups[0]["lr"]
    return seen, model


def train_fp32(batches: list[list[tuple[Tensor, Tensor]]], config: Config, rank: Rank) -> tuple[list[float], nn.Module]:
    """Train the same way in FP32; return the gradient norms before clipping, and the model."""
    model, optimizer, scheduler = start(config, rank)
    norms = []
    for micro_batches in batches:
        optimizer.zero_grad()
        for x, y in micro_batches:
            (cross_entropy(model(x), y) / len(micro_batches)).backward()
        norms.append(clip_grad_norm_(model.parameters(), config.max_norm).item())
        optimizer.step()
        scheduler.step()
    return norms, model


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Train every case on rank 0 while the other ranks wait."""
    if rank.rank == 0:
        torch.manual_seed(config.seed + 1)
        batches = [
            [tuple(t.to(rank.device) for t in make_batch(config.rows)) for _ in range(MICRO_BATCHES)]
            for _ in range(config.steps)
        ]
        yield from _cases(batches, config, rank)
    rank.barrier()


def _cases(batches: list[list[tuple[Tensor, Tensor]]], config: Config, rank: Rank) -> Iterator[Record]:
    begin = vector(start(config, rank)[0])
    right, _ = train("right", batches, config, rank)
    norms, reference = train_fp32(
        [b for b, skipped in zip(batches, right.skipped, strict=True) if not skipped], config, rank
    )
    way = vector(reference) - begin
    for done, case in enumerate(config.cases, start=1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen, model = train(case, batches, config, rank)
        seen.warned = len(caught)
        moved = vector(model) - begin
        finite = [n for n, skipped in zip(seen.norm, seen.skipped, strict=True) if math.isfinite(n) and not skipped]
        signs = {
            "steps taken": len(seen.skipped) - sum(seen.skipped),
            "scale at the end": seen.scale[-1],
            "norm that clipping saw, FP32 = 1": median(finite) / median(norms) if finite else 1e9,
            "distance moved, FP32 = 1": _number(moved.norm() / way.norm()),
            "learning rate at the end": seen.lr,
            "warnings": seen.warned,
        }
        for sign, value in signs.items():
            yield rank.record("count", "1", value, case=case, sign=sign)
        yield rank.record("weight_error", "1", _number((moved - way).norm() / way.norm()), case=case)
        yield rank.record("scale", "1", seen.scale, case=case)
        yield rank.record("skipped", "1", [float(s) for s in seen.skipped], case=case)
        rank.progress(done, len(config.cases), case)


def vector(model: nn.Module) -> Tensor:
    """Return all parameters as one flat vector."""
    return parameters_to_vector(model.parameters()).detach().clone()


def _number(ratio: Tensor) -> float:
    """Return the ratio as a float; records can't hold NaN or infinity, so those become 1e9."""
    return ratio.item() if math.isfinite(ratio) else 1e9


def as_fp32(records: Records, case: str) -> bool:
    """Return whether this case ends with FP32's weights, up to rounding."""
    return records.one("weight_error", case=case).value <= TOLERANCE


def category(records: Records) -> str:
    """Say whether only the right case trains like FP32."""
    cases = [r.case["case"] for r in records.where("weight_error")]
    found = [as_fp32(records, case) for case in cases]
    return "only the right one trains as FP32" if found[0] and not any(found[1:]) else "other"


def answer(records: Records) -> Iterator[str]:
    """Yield what each case did, and whether its weights match FP32's."""
    for r in records.where("weight_error"):
        case = r.case["case"]
        steps, scale = (records.one("count", case=case, sign=s).value for s in ("steps taken", "scale at the end"))
        end = "as FP32" if as_fp32(records, case) else f"its weights are {100 * r.value:.3g} % off FP32's"
        yield f"{case}: {steps:.0f} steps taken, scale {scale:g} at the end, {end}."


if __name__ == "__main__":
    cli.main()
