"""What does GradScaler do, and what happens in the wrong order?

    python -m labs.loss_scaling --nproc 1
    torchrun --nproc-per-node 1 -m labs.loss_scaling --model char_gpt --orders right "clip before unscale_"

About 3 s on 2 CPU cores. First its scale, step by step: through an overflow that is planted, and from a start that
is too large. Then every order of labs/loss_scaling/loss_scaling_orders.py, each compared with FP32 from the
same start on the same batches. All in FP16, also on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from labs.common import models
from labs.common.precision import amp
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.loss_scaling.loss_scaling_orders import TOO_LARGE_SCALE, MicroBatches
from labs.loss_scaling.loss_scaling_trial import DEFAULT_SCALE, ORDERS, SPIKE, TOO_LARGE, Order, Trial

TOLERANCE = {"sgd": 4, "adamw": 16}
"""How far the right order may be from FP32 after 20 steps, in units of its format's rounding error. Adam: further,
since it divides by the gradient's size, and so enlarges what rounding has done to the smallest ones.
For smooth models (GELU): a ReLU that rounding has flipped makes more difference than the rounding."""
ROUNDING = {"fp16": 2.0**-11, amp.NO_SCALING: 2.0**-11, "bf16": 2.0**-8}
WHOLE_IN_NOTEBOOKS = True  # with one optimizer alone the notebook could not compare the two
MOST_ERROR = 1e6  # parameters that are not finite, or further off than this, are recorded as this far off


@dataclass(frozen=True)
class Config:
    """What to train, for how long, and in which orders."""

    model: str = "labs.loss_scaling.loss_scaling_trial:perceptron"
    """One of labs.models.MODELS, or package.module:factory, as this small and smooth one."""
    orders: tuple[str, ...] = tuple(ORDERS)
    """Orders to compare with FP32, of labs/loss_scaling/loss_scaling_trial.py."""
    optimizers: tuple[Literal["sgd", "adamw"], ...] = ("sgd", "adamw")
    """Each order is tried with each: Adam divides a gradient's scale away, SGD does not."""
    steps: int = 20
    """Optimizer steps of every order and of both traces."""
    micro_batch: int = 8
    """Rows of a micro-batch."""
    accumulate: int = 2
    """Micro-batches per optimizer step."""
    max_norm: float = 4.0
    """Largest norm of a gradient; longer ones are clipped."""
    growth_interval: int = 6
    """Good steps after which the traced scale doubles; torch's default is 2000."""
    overflow_step: int = 8
    """The step, from 0, whose loss is 65,536 times too large."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """SGD only."""

    def __post_init__(self) -> None:
        require(len(self.orders) > 0, "orders must name at least one order")
        for order in self.orders:
            require(order in ORDERS, f"there is no order {order!r}: the orders are {'; '.join(ORDERS)}")
        require(len(set(self.orders)) == len(self.orders), "orders must name each order once")
        require(0 < len(set(self.optimizers)) == len(self.optimizers), "optimizers: name sgd, adamw or both, once")
        require(self.micro_batch >= 1, f"micro_batch must be at least 1, not {self.micro_batch}")
        require(self.accumulate >= 2, f"accumulate must be at least 2, not {self.accumulate}: 1 is no accumulation")
        require(self.max_norm > 0, f"max_norm must be positive, not {self.max_norm}")
        require(self.growth_interval >= 1, f"growth_interval must be at least 1, not {self.growth_interval}")
        require(self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        require(
            0 <= self.overflow_step < self.steps,
            f"overflow_step must be one of the {self.steps} steps, from 0, not {self.overflow_step}",
        )
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built."""
    models.build(config.model)


def predict(overflows: Sequence[bool], init_scale: float, growth_interval: int) -> list[float]:
    """The scale at the start of each step and after the last: halved by an overflow, doubled after enough good steps.

    Both start the count anew. Source: torch.amp.GradScaler with its factors of 0.5 and 2.
    """
    scales, good = [init_scale], 0
    for overflow in overflows:
        good = 0 if overflow else good + 1
        grown = good == growth_interval
        scales.append(scales[-1] * (0.5 if overflow else 2.0 if grown else 1.0))
        good = 0 if grown else good
    return scales


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Two traces, all orders, gradients without zero_grad."""
    batches = _batches(config, rank.device)
    workload = models.make(config.model, config.seed)
    why = amp.impossible(workload.module.to(rank.device), workload.loss, batches[0][0], "fp16")
    if why:
        yield rank.record("not_possible", "1", 1.0, precision="fp16", why=why)
        return
    yield from _trace("planted overflow", DEFAULT_SCALE, config.overflow_step, batches, config, rank)
    yield from _trace("too large a start", TOO_LARGE_SCALE, None, batches, config, rank)
    yield from _same_batch(batches[0], config, rank)
    optimizers = config.optimizers[:1] if config.smoke else config.optimizers
    trials = [(optimizer, order) for optimizer in optimizers for order in config.orders]
    references: dict[tuple[str, str, bool], tuple[Tensor, int]] = {}
    for done, (optimizer, order) in enumerate(trials, start=1):
        yield from _compare(order, optimizer, batches, references, config, rank)
        rank.progress(done, len(trials), f"{order}, {optimizer}")


def _batches(config: Config, device: torch.device) -> list[MicroBatches]:
    """Micro-batches of every step."""
    workload, rows = models.build(config.model, config.seed), config.micro_batch * config.accumulate
    steps = [[t.to(device) for t in workload.make_batch(rows)] for _ in range(config.steps)]
    return [list(zip(*(t.split(config.micro_batch) for t in xy), strict=True)) for xy in steps]


def _times(loss: Callable[[Tensor, Tensor], Tensor], factor: float, output: Tensor, y: Tensor) -> Tensor:
    return loss(output, y) * factor


def _trace(
    name: str, init_scale: float, overflow_step: int | None, batches: list[MicroBatches], config: Config, rank: Rank
) -> Iterator[Record]:
    """Scale before each step; whether its gradient was not finite, and its optimizer step skipped; its loss."""
    scaler = {"init_scale": init_scale, "growth_interval": config.growth_interval}
    trial = Trial(config.model, config.seed, rank.device, max_norm=config.max_norm, **scaler)
    t, seen = trial.training, {"scale": [], "found_inf": [], "skipped": [], "loss": []}
    for i, batch in enumerate(batches):
        before, factor = trial.seen.steps, SPIKE if i == overflow_step else 1.0
        seen["scale"].append(t.scaler.get_scale())
        loss = partial(_times, trial.workload.loss, factor)
        value = amp.train_step(t.module, loss, batch, t.optimizer, t.name, t.scaler, t.max_norm)
        gradients = [p.grad for p in t.module.parameters() if p.grad is not None]
        seen["found_inf"].append(not all(bool(g.isfinite().all()) for g in gradients))
        seen["skipped"].append(trial.seen.steps == before)
        seen["loss"].append(value.item())
    case = {"trace": name, "growth_interval": config.growth_interval, "overflow_step": overflow_step}
    units = {"scale": "1", "found_inf": "1", "skipped": "1", "loss": "nats"}
    for metric, samples in seen.items():
        yield rank.record(metric, units[metric], samples, **case)
    expected = predict(seen["found_inf"], init_scale, config.growth_interval)[:-1]
    yield rank.record("predicted_scale", "1", expected, kind="modelled", **case)


def _same_batch(batch: MicroBatches, config: Config, rank: Rank) -> Iterator[Record]:
    """Norms of three gradients on the same batch with learning rate 0, relative to the first; no clipping."""
    for order in ("right", "no zero_grad", "bf16", "no zero_grad, bf16"):
        trial = Trial(config.model, config.seed, rank.device, name=ORDERS[order].precision, lr=0.0)
        for _ in range(3):
            trial.step(ORDERS[order].step, batch)
        norms = trial.seen.norms
        yield rank.record("same_batch_norm_ratio", "1", [n / norms[0] for n in norms], order=order)


def _compare(
    name: str, optimizer: str, batches: list[MicroBatches], references: dict, config: Config, rank: Rank
) -> Iterator[Record]:
    """One order against FP32: how far its parameters are off, relative to how far FP32 has moved them."""
    order = ORDERS[name]
    settings = {"max_norm": config.max_norm, "scheduled": config.steps if order.scheduled else 0}
    key = (optimizer, order.event, order.scheduled)
    if key not in references:
        reference = Trial(config.model, config.seed, rank.device, optimizer, "fp32", **settings)
        steps = reference.run(Order(event=order.event), batches, config.overflow_step, lost=True).steps
        references[key] = (reference.vector(), steps)
    scale = TOO_LARGE_SCALE if order.event == TOO_LARGE else DEFAULT_SCALE
    trial = Trial(config.model, config.seed, rank.device, optimizer, order.precision, init_scale=scale, **settings)
    start = trial.vector()
    seen = trial.run(order, batches, config.overflow_step)
    precision = "bf16" if name.startswith("bf16") else order.precision
    case = {
        "order": name,
        "optimizer": optimizer,
        "event": order.event,
        "precision": precision,
        "reference_steps": references[key][1],
        "raised": seen.raised,
        "warned": seen.warned,
    }
    moved, true = trial.vector() - start, references[key][0] - start
    error, ratio = ((moved - true).norm() / true.norm()).item(), (moved.norm() / true.norm()).item()
    finite = math.isfinite(error)
    yield rank.record("parameter_error", "1", min(error, MOST_ERROR) if finite else MOST_ERROR, **case)
    yield rank.record("update_ratio", "1", min(ratio, MOST_ERROR) if finite else MOST_ERROR, **case)
    yield rank.record("diverged", "runs", int(not finite), **case)
    yield rank.record("optimizer_steps", "steps", seen.steps, **case)
    yield rank.record("lowered_share", "1", sum(seen.lowered) / max(1, len(seen.lowered)), **case)
    yield rank.record("last_scale", "1", trial.training.scaler.get_scale(), **case)
    if norms := [n for n in seen.norms if math.isfinite(n)]:
        yield rank.record("clip_norm", "1", norms, **case)


def outcomes(records: Records, optimizer: str = "sgd") -> list[dict]:
    """One row per order: `order`, `outcome`, `parameter_error`, `tolerance`, `optimizer_steps`, `clip_norm`, `raised`.

    outcome: "stops with an error", "not finite", "loses steps" that FP32 did, "wrong" (further from FP32 than
    `tolerance`) or "as FP32". `clip_norm` is the median of the finite norms that clipping saw, or None.
    """
    rows = []
    for r in records.where("parameter_error", optimizer=optimizer):
        of = partial(records.where, order=r.case["order"], optimizer=optimizer)
        steps, norms = int(of("optimizer_steps")[0].value), of("clip_norm")
        tolerance = TOLERANCE[optimizer] * ROUNDING[r.case["precision"]]
        problems = {
            "stops with an error": r.case["raised"] != "none",
            "not finite": of("diverged")[0].value > 0,
            "loses steps": steps < r.case["reference_steps"],
            "wrong": r.value > tolerance,
        }
        outcome = next((name for name, found in problems.items() if found), "as FP32")
        rows.append(
            {
                "order": r.case["order"],
                "outcome": outcome,
                "parameter_error": r.value,
                "tolerance": tolerance,
                "optimizer_steps": steps,
                "clip_norm": norms[0].value if norms else None,
                "raised": r.case["raised"],
            }
        )
    return rows


def answer(run: Records) -> Iterator[str]:
    """Whether the scale follows its rule, and how many orders train as FP32, stop, or go wrong without a word."""
    for r in run.where("not_possible"):
        yield f"FP16 is not possible here: {r.case['why']}."
    for r in run.where("scale"):
        same = r.samples == run.one("predicted_scale", trace=r.case["trace"]).samples
        skipped = run.one("skipped", trace=r.case["trace"]).samples
        name, lost = r.case["trace"], f"{sum(skipped):.0f} of {len(skipped)} steps"
        yield (
            f"Trace {name!r}: {lost} are skipped; the scale goes from "
            f"{r.samples[0]:,.0f} to {r.samples[-1]:,.0f}, "
            f"{'as' if same else 'NOT as'} its rule has it."
        )
    for optimizer in dict.fromkeys(r.case["optimizer"] for r in run.where("parameter_error")):
        by_outcome: dict[str, list[str]] = {}
        for row in outcomes(run, optimizer):
            by_outcome.setdefault(row["outcome"], []).append(row["order"])
        counts = ", ".join(f"{outcome}: {len(names)}" for outcome, names in by_outcome.items())
        silent = "; ".join(by_outcome.get("wrong", [])) or "none"
        yield f"Orders of calls with {optimizer}, by what comes of them: {counts}. Wrong without a word: {silent}."
