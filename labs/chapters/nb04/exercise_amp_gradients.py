"""The numbers of exercise 04.1: which gradients the optimizer used, and what the step left behind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from labs.chapters.nb04.exercise_watched_training import Step

Finding = tuple[str, str]
"""What was done, and a hint."""
ORDER = "backward for all micro-batches, unscale_, clip, step, update"


def gradient_faults(step: Step) -> Iterator[Finding]:
    """Nothing if the optimizer used what the reference used, however it came about."""
    got, want = step.own.applied, step.reference.applied
    if got is None or want is None or _close(got, want):
        return
    yield from _clipped_scaled(step)
    yield from _scaled_wrongly(step, got, want)
    if _cosine(got, want) < 0.999 and torch.isclose(got.abs().max(), torch.tensor(step.max_norm), rtol=1e-3):
        yield ("the gradients were cut off element by element: they point into another direction now",
               "torch.nn.utils.clip_grad_norm_ makes all of them shorter by one factor")  # fmt: skip
    if got.norm() > 1.01 * step.max_norm:
        yield from _not_clipped(step, got)
    elif want.norm() < 0.99 * step.max_norm and got.norm() < 0.99 * want.norm():
        yield (f"the gradient's norm is {want.norm():.3g}, max_norm is {step.max_norm:g}, and yet the optimizer got a "
               f"norm of {got.norm():.3g}", "clip to the argument max_norm")  # fmt: skip
    yield (f"the optimizer used a gradient of norm {got.norm():.3g}; that of the whole batch, clipped to "
           f"{step.max_norm:g}, has {want.norm():.3g} (cosine {_cosine(got, want):.3f})", ORDER)  # fmt: skip


def _clipped_scaled(step: Step) -> Iterator[Finding]:
    unscaled = step.all("unscale_")
    entry = (unscaled or step.all("scaler.step"))[0]
    if not entry.touched or not _close(entry.grads, entry.grads.norm() / entry.accumulated.norm() * entry.accumulated):
        return
    what = (f"the gradients were clipped while they were still {step.scale:g} times too large: max_norm "
            f"{step.max_norm:g} cut them to {step.own.applied.norm():.2g}")  # fmt: skip
    if unscaled:
        yield f"{what}, because unscale_() came after clipping", ORDER
    else:
        yield f"{what}, because only step() unscaled them", "scaler.unscale_(optimizer) before clipping"


def _scaled_wrongly(step: Step, got: Tensor, want: Tensor) -> Iterator[Finding]:
    """A factor that is wrong already in what the backward passes left."""
    own, right = (w.events[-1].accumulated for w in (step.own, step.reference))
    ratio, n = (own.norm() / right.norm()).item(), step.job.micro_batches
    if _cosine(own, right) < 0.99 or abs(ratio - 1) < 0.02:
        return
    if abs(ratio - n) < 0.02 * n:
        yield (f"the losses of {n} micro-batches were added, not averaged: the gradient is {n} times too large",
               "divide each loss by len(micro_batches)")  # fmt: skip
    elif abs(ratio * step.scale - 1) < 0.2:
        yield ("backward() ran from the loss without its scale: scale() does not change the loss, it returns "
               "another one", "scaler.scale(loss).backward()")  # fmt: skip
    elif abs(ratio * n - 1) < 0.02:
        yield (f"the loss was divided by {n} twice: the gradient is {n} times too small",
               "loss_fn returns a mean over rows already: divide it by len(micro_batches), once")  # fmt: skip
    else:
        yield (f"with {n} micro-batches the accumulated gradient is {ratio:.3g} times what it should be",
               "divide each loss by len(micro_batches), scale it, and nothing else")  # fmt: skip


def _not_clipped(step: Step, got: Tensor) -> Iterator[Finding]:
    what = f"the optimizer used a gradient of norm {got.norm():.3g}, but max_norm is {step.max_norm:g}"
    later = [e.grads.norm() for e in step.all("update")] + [step.own.grads().norm()]
    if any(0 < norm <= 1.01 * step.max_norm for norm in later):
        yield f"{what}: the clipping came after scaler.step()", ORDER
    elif not _close(got, step.own.events[-1].accumulated / step.scale):
        yield f"{what}: it was clipped, but not to that norm", "the norm over all parameters together, norm_type=2"
    else:
        yield f"{what}: nothing has clipped it", "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"


def outcome_faults(step: Step) -> Iterator[Finding]:
    """The scale and the parameters after the step; a planted overflow must have changed only the scale."""
    if step.overflow and "non-finite" in str(step.error):
        yield ("clipping raised a RuntimeError because the gradients held inf. With FP16 that is no error: the scaler "
               "skips such a step and halves the scale", "leave error_if_nonfinite at False")  # fmt: skip
    if step.overflow and not torch.equal(step.own.parameters(), step.before):
        yield ("a gradient was inf, and the parameters changed all the same: this step has to be skipped",
               "leave inf and NaN in the gradients, so that scaler.step(optimizer) sees them")  # fmt: skip
    updates, scale = len(step.all("update")), step.own.scaler.get_scale()
    after = "a gradient was inf, and " if step.overflow else ""
    if step.error is None and not updates:
        yield (f"{after}scaler.update() was not called: the scale stays {scale:g} whatever happens",
               "scaler.update() after scaler.step(optimizer), in every step, skipped or not")  # fmt: skip
    if updates > 1:
        yield (f"scaler.update() was called {updates} times in one step. PyTorch says: {step.error}",
               "once, after scaler.step(optimizer)")  # fmt: skip
    if step.error is None and scale != step.reference.scaler.get_scale():
        yield (f"{after}the scale went from {step.scale:g} to {scale:g}, not to "
               f"{step.reference.scaler.get_scale():g}", "scaler.update() without arguments decides")  # fmt: skip
    moved = (step.reference.parameters() - step.before).norm()
    if (
        step.error is None
        and (step.own.parameters() - step.reference.parameters()).norm() > 0.02 * moved + 1e-3 * step.before.norm()
    ):
        yield ("the gradient was right, but the parameters are not what this optimizer makes of it",
               "change parameters through scaler.step(optimizer) only, once")  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 0.02 * b.norm())


def _cosine(a: Tensor, b: Tensor) -> float:
    return (a @ b / (a.norm() * b.norm())).item()
