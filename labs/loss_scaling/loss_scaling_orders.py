"""Training steps with a GradScaler: the right order, and the wrong ones that people write.

Each is the step of `amp.train_step` with one thing changed, marked with `<-`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from labs.common.precision import amp

MicroBatches = Sequence[tuple[Tensor, Tensor]]
TOO_LARGE_SCALE = 2.0**24  # overflows with every model here; GradScaler's own start is 2.0**16


@dataclass
class Training:
    """What a step works on. `loss` is a mean over rows; `name` is one of labs.common.precision.amp.FORMATS."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    max_norm: float
    name: str = "fp16"
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None


def right(t: Training, micro_batches: MicroBatches) -> None:
    """As `amp` has it; the scheduler goes on only where the optimizer did: a skipped step lowers the scale."""
    before = t.scaler.get_scale()
    amp.train_step(t.module, t.loss, micro_batches, t.optimizer, t.name, t.scaler, t.max_norm)
    if t.scheduler is not None and t.scaler.get_scale() >= before:
        t.scheduler.step()


def _mean_loss(t: Training, x: Tensor, y: Tensor, micro_batches: MicroBatches) -> Tensor:
    """This micro-batch's part of the mean over all rows, under autocast."""
    with amp.precision(t.name, x.device):
        return t.loss(t.module(x), y) * (len(x) / sum(len(x) for x, _ in micro_batches))


def _backward(t: Training, micro_batches: MicroBatches) -> None:
    """Leave the scaled gradient of all rows in .grad, added to what is there."""
    for x, y in micro_batches:
        t.scaler.scale(_mean_loss(t, x, y, micro_batches)).backward()


def _clip(t: Training) -> None:
    nn.utils.clip_grad_norm_(t.module.parameters(), t.max_norm)


def _finish(t: Training) -> None:
    """Unscale, clip, step and update."""
    t.scaler.unscale_(t.optimizer)
    _clip(t)
    t.scaler.step(t.optimizer)
    t.scaler.update()


def no_zero_grad(t: Training, micro_batches: MicroBatches) -> None:
    """Old gradients stay in .grad, unscaled, so that next to new, scaled ones they count 1/scale: until an overflow.

    Then the inf stays too: every later step is skipped, and the scale falls for ever.
    """
    _backward(t, micro_batches)  # <- no zero_grad() before it
    _finish(t)


def clip_before_unscale(t: Training, micro_batches: MicroBatches) -> None:
    """The scaled norm is clipped, and what is left of it is divided by the scale."""
    t.optimizer.zero_grad()
    _backward(t, micro_batches)
    _clip(t)  # <- before unscale_, which step() does
    t.scaler.step(t.optimizer)
    t.scaler.update()


def around_the_scaler(t: Training, micro_batches: MicroBatches) -> None:
    """The gradient is right, yet nobody looks whether it is finite."""
    t.optimizer.zero_grad()
    _backward(t, micro_batches)
    t.scaler.unscale_(t.optimizer)
    _clip(t)
    t.optimizer.step()  # <- not scaler.step(optimizer)
    t.scaler.update()


def scaled_gradient(t: Training, micro_batches: MicroBatches) -> None:
    """The optimizer is given the gradient times the scale, unless clipping happens to shorten it."""
    t.optimizer.zero_grad()
    _backward(t, micro_batches)
    _clip(t)
    t.optimizer.step()  # <- no unscale_, not scaler.step(optimizer); update() would now raise


def scaled_gradient_unclipped(t: Training, micro_batches: MicroBatches) -> None:
    """The same without clipping: the learning rate is the scale times too large."""
    t.optimizer.zero_grad()
    _backward(t, micro_batches)
    t.optimizer.step()  # <-


def unscale_and_update_every_micro_batch(t: Training, micro_batches: MicroBatches) -> None:
    """update() silences the error; all but the last micro-batch are now divided by the scale several times."""
    t.optimizer.zero_grad()
    for x, y in micro_batches[:-1]:
        t.scaler.scale(_mean_loss(t, x, y, micro_batches)).backward()
        t.scaler.unscale_(t.optimizer)  # <-
        t.scaler.update()  # <-
    x, y = micro_batches[-1]
    t.scaler.scale(_mean_loss(t, x, y, micro_batches)).backward()
    _finish(t)


def unscale_twice(t: Training, micro_batches: MicroBatches) -> None:
    """Once to look at the norm, and once more to clip."""
    t.optimizer.zero_grad()
    _backward(t, micro_batches)
    t.scaler.unscale_(t.optimizer)  # <-
    _finish(t)


def loss_not_divided(t: Training, micro_batches: MicroBatches) -> None:
    """The sum of m means in place of their mean."""
    t.optimizer.zero_grad()
    for x, y in micro_batches:
        with amp.precision(t.name, x.device):
            value = t.loss(t.module(x), y)  # <- not divided by the number of micro-batches
        t.scaler.scale(value).backward()
    _finish(t)


def no_autocast(t: Training, micro_batches: MicroBatches) -> None:
    """A scaler alone: scaling by a power of two and back changes nothing in FP32."""
    t.name = "fp32"  # <- no autocast
    right(t, micro_batches)


def scheduler_always(t: Training, micro_batches: MicroBatches) -> None:
    """The schedule goes on although the step was skipped."""
    scheduler, t.scheduler = t.scheduler, None
    right(t, micro_batches)
    scheduler.step()  # <- whether or not the optimizer stepped
    t.scheduler = scheduler


def scaler_every_step(t: Training, micro_batches: MicroBatches) -> None:
    """A new scaler has forgotten what the last one learnt of overflows."""
    t.scaler = amp.scaler(t.name, micro_batches[0][0].device, init_scale=TOO_LARGE_SCALE)  # <- once, before the loop
    right(t, micro_batches)
