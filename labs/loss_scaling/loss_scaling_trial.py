"""The orders of loss_scaling_orders.py by name, and a model in training that is watched from outside."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from labs.common import models
from labs.common.precision import amp
from labs.loss_scaling import loss_scaling_orders as orders
from labs.loss_scaling.loss_scaling_orders import MicroBatches, Training

DEFAULT_SCALE = 2.0**16  # GradScaler's own
SPIKE = 2.0**16  # the planted overflow: a loss that many times too large, far beyond FP16 once it is scaled
HARD_EVERY, HARD = 5, 3.0  # every fifth batch has three times the loss: one for clipping
NO_EVENT, OVERFLOW, TOO_LARGE = "none", "one overflow", "scale starts too large"
OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.05), "adamw": partial(torch.optim.AdamW, lr=1e-3)}


def perceptron() -> models.Workload:
    """A 256-128-10 perceptron with GELU (34,186 parameters) on random rows with a learnable rule.

    Smooth: a ReLU that flips near 0 makes a difference of percents to FP32 that no wrong order has made.
    """
    module = nn.Sequential(nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 10))

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch_size, 256)
        return x, x[:, :100].reshape(batch_size, 10, 10).sum(2).argmax(1)

    return models.Workload(module, make_batch, nn.functional.cross_entropy)


@dataclass(frozen=True)
class Order:
    """A way to do a step in a format of labs.common.precision.amp, with or without a scaler as that format has it.

    `event` happens to it on its way; `scheduled`: the learning rate falls to 0.
    """

    step: Callable[[Training, MicroBatches], None] = orders.right
    event: str = NO_EVENT
    scheduled: bool = False
    precision: str = "fp16"
    means: str = ""
    """What the learner wrote, in words."""


ORDERS: dict[str, Order] = {
    "right": Order(means="as amp.train_step has it"),
    "no zero_grad": Order(orders.no_zero_grad, means="zero_grad is missing"),
    "no zero_grad, overflow": Order(
        orders.no_zero_grad, OVERFLOW, means="zero_grad is missing, and one gradient overflows"
    ),
    "no zero_grad, bf16": Order(
        orders.no_zero_grad, precision="bf16", means="zero_grad is missing, in BF16 without a scaler"
    ),
    "clip before unscale_": Order(orders.clip_before_unscale, means="the gradient is clipped while it is still scaled"),
    "optimizer.step": Order(orders.around_the_scaler, means="optimizer.step() in place of scaler.step(optimizer)"),
    "optimizer.step, overflow": Order(
        orders.around_the_scaler,
        OVERFLOW,
        means="optimizer.step() in place of scaler.step(optimizer), and one gradient overflows",
    ),
    "optimizer.step, not unscaled": Order(
        orders.scaled_gradient, means="optimizer.step() on the scaled gradient, clipped"
    ),
    "optimizer.step, not unscaled or clipped": Order(
        orders.scaled_gradient_unclipped, means="optimizer.step() on the scaled gradient, not clipped"
    ),
    "unscale_ and update every micro-batch": Order(
        orders.unscale_and_update_every_micro_batch, means="unscale_ and update after every micro-batch"
    ),
    "unscale_ twice": Order(orders.unscale_twice, means="unscale_ twice in one step"),
    "loss not divided": Order(orders.loss_not_divided, means="losses of micro-batches are added, not averaged"),
    "scaler, no autocast": Order(orders.no_autocast, means="a scaler, but no autocast: all in FP32"),
    "autocast, no scaler": Order(precision=amp.NO_SCALING, means="FP16 autocast, but no scaler"),
    "bf16": Order(precision="bf16", means="BF16, no scaler"),
    "right, overflow": Order(event=OVERFLOW, means="right, and one gradient overflows"),
    "scheduler always, overflow": Order(
        orders.scheduler_always,
        OVERFLOW,
        scheduled=True,
        means="scheduler.step() also after a step that was skipped for an overflow",
    ),
    "right, scale too large": Order(event=TOO_LARGE, means="right, from a scale that is far too large"),
    "new scaler every step, scale too large": Order(
        orders.scaler_every_step, TOO_LARGE, means="a new scaler in every step, from a scale that is far too large"
    ),
}


@dataclass
class Seen:
    """What a run was seen to do: `raised` and `warned` are "none" or the words; `norms` are those clipping saw."""

    steps: int = 0
    norms: list[float] = field(default_factory=list)
    lowered: list[bool] = field(default_factory=list)
    raised: str = "none"
    warned: str = "none"


class Trial:
    """A model in training from a given start, watched: its optimizer steps, norms and the layers' formats."""

    def __init__(
        self,
        model: str,
        seed: int,
        device: torch.device,
        optimizer: str = "sgd",
        name: str = "fp16",
        scheduled: int = 0,
        max_norm: float = math.inf,
        lr: float | None = None,
        **scaler: float,
    ) -> None:
        """`scheduled`: steps until the learning rate is 0, or 0 for none. `scaler`: GradScaler's own settings."""
        self.workload, self.seen = models.make(model, seed), Seen()
        module = self.workload.module.to(device)
        self.optimizer = OPTIMIZERS[optimizer](module.parameters(), **({} if lr is None else {"lr": lr}))
        scaler_ = amp.scaler(name, device, **scaler)
        self.training = Training(module, self.workload.loss, self.optimizer, scaler_, max_norm, name)
        if scheduled:
            decay = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, total_iters=scheduled)
            self.training.scheduler = decay
        self.optimizer.register_step_post_hook(self._count)
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.register_forward_hook(lambda _, __, output: self.seen.lowered.append(output.itemsize == 2))

    def _count(self, *_: Any) -> None:
        self.seen.steps += 1

    def step(self, order: Callable[[Training, MicroBatches], None], batch: MicroBatches, factor: float = 1.0) -> None:
        """One step in this `order`; its loss is multiplied by `factor`."""
        self.training.loss = lambda output, y: self.workload.loss(output, y) * factor
        clip = nn.utils.clip_grad_norm_

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            norm = clip(*args, **kwargs)
            self.seen.norms.append(norm.item())
            return norm

        with mock.patch.object(nn.utils, "clip_grad_norm_", watched):
            order(self.training, batch)

    def run(self, order: Order, batches: Sequence[MicroBatches], overflow_step: int, lost: bool = False) -> Seen:
        """One step per batch, until one raises; the overflow is planted, or `lost`: that batch is left out."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i, batch in enumerate(batches):
                planted = order.event == OVERFLOW and i == overflow_step
                if planted and lost:
                    continue
                try:
                    self.step(order.step, batch, SPIKE if planted else HARD if i % HARD_EVERY == 1 else 1.0)
                except (RuntimeError, ValueError, AssertionError) as e:
                    self.seen.raised = _line(e)
                    break
        self.seen.warned = _line(caught[0].message) if caught else "none"
        return self.seen

    def vector(self) -> Tensor:
        """All parameters as one new vector in FP32."""
        return torch.cat([p.detach().flatten().float() for p in self.training.module.parameters()])


def _line(told: Exception | Warning | str) -> str:
    return f"{type(told).__name__}: {' '.join(str(told).split())}"[:240]
