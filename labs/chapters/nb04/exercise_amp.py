"""Checker of exercise 04.1: several steps of FP16 training, watched call by call, beside a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from labs.chapters.nb04 import solutions as solution
from labs.chapters.nb04.exercise_amp_gradients import Finding, gradient_faults, outcome_faults
from labs.chapters.nb04.exercise_watched_training import Job, Step, Watched
from labs.kit.check import Mistake

Function = Callable[..., Any]
LOOSE = 1e3
"""A max_norm that no gradient here reaches."""


JOBS = (
    Job(1, 3, 2.0**12, (LOOSE, 0.5, 0.5, LOOSE), overflow=2),
    Job(2, 4, 2.0**10, (0.8, LOOSE)),
    Job(3, 1, 64.0, (LOOSE,)),
)


def check_train_step(f: Function) -> None:
    """Loose and tight clipping, a planted overflow, other numbers of micro-batches and scales."""
    for job in JOBS:
        own, reference = Watched(job.seed, job.scale), Watched(job.seed, job.scale)
        for i, max_norm in enumerate(job.max_norms):
            before, scale, batches = own.parameters(), own.scaler.get_scale(), job.batches(i)
            reference.run(solution.train_step, batches, max_norm)
            error = own.run(f, batches, max_norm)
            step = Step(own, reference, job, max_norm, scale, before, error, overflow=i == job.overflow)
            for what, hint in _faults(step):
                nth = ("first", "second", "third", "fourth")[i]
                raise Mistake(what if i == 0 else f"in the {nth} call of train_step {what}", hint) from error
            if error is not None:
                raise error


def _faults(step: Step) -> Iterator[Finding]:
    """Faults in the order in which a step runs; the numbers come last, when all calls are in order."""
    yield from _forward(step)
    yield from _backward(step)
    yield from _too_early(step)
    yield from _around_the_scaler(step)
    yield from gradient_faults(step)
    yield from outcome_faults(step)


NOWHERE = "outside of any autocast"
AUTOCAST = "with torch.amp.autocast(device_type, dtype=torch.float16): around model(x) and loss_fn(...)"


def _forward(step: Step) -> Iterator[Finding]:
    n, forwards = step.job.micro_batches, step.all("forward")
    if old := [w for w in step.own.warnings if "amp.autocast(args...)` is deprecated" in w]:
        kind = "cuda" if "torch.cuda" in old[0] else "cpu"
        yield (f"torch.{kind}.amp.autocast is deprecated, and it works on no device but {kind}",
               "torch.amp.autocast(device_type, dtype=torch.float16), device_type = "
               "next(model.parameters()).device.type")  # fmt: skip
    if any(p.dtype != torch.float32 for p in step.own.model.parameters()):
        yield ("the parameters are no longer FP32: a step smaller than half their spacing would be lost",
               "leave the model alone: autocast makes FP16 copies for the ops that profit from them")  # fmt: skip
    for i, event in enumerate(forwards, 1):
        if event.autocast is None:
            where = "in an autocast for another device: it is on the CPU" if step.own.autocast_elsewhere else NOWHERE
            yield f"model(x) of micro-batch {i} of {n} ran in FP32, {where}", AUTOCAST
        elif event.autocast != torch.float16:
            yield (f"the forward pass ran in {str(event.autocast)[6:]}, not float16",
                   "dtype=torch.float16; without a dtype it is bfloat16 on a CPU, float16 on a GPU")  # fmt: skip
    if step.error is None and len(forwards) != n:
        rows = f", the first with {forwards[0].rows} rows" if forwards else ""
        yield (f"{n} micro-batches of 8 rows, but model(x) ran {len(forwards)} times{rows}",
               "one forward and one backward for each micro-batch")  # fmt: skip


def _backward(step: Step) -> Iterator[Finding]:
    n, backwards = step.job.micro_batches, step.all("backward")
    if any(e.autocast for e in backwards):
        yield ("backward() ran inside autocast. Backward ops take the format of their forward ops already; inside, "
               "autocast lowers ops of backward functions that were meant to run in FP32",
               "end the `with` block after the loss")  # fmt: skip
    if backwards and backwards[0].grads.any():
        yield ("the gradients of the call before were still there when backward() began, and it adds to them",
               "optimizer.zero_grad() once per step, before the loop")  # fmt: skip
    if [e.what for e in step.own.events if e.what.endswith("ward")][:2] == ["forward", "forward"]:
        yield (f"all {n} forward passes came before the first backward: their activations are in memory at once",
               "call backward() for each micro-batch; .grad does the adding")  # fmt: skip
    if any(not e.grads.any() for e in backwards[1:]):
        yield ("the gradients were zeroed between two micro-batches: those of the earlier ones are lost",
               "optimizer.zero_grad() once per step, before the loop, not in it")  # fmt: skip
    if step.error is None and len(backwards) != n:
        yield f"{n} micro-batches, but {len(backwards)} backward passes", "scaler.scale(loss).backward() for each"
    scales = len(step.all("scale"))
    if backwards and step.error is None and not any(map(step.all, ("scale", "unscale_", "scaler.step", "update"))):
        yield ("the scaler that train_step is given was not used at all: a new one would forget in each step what it "
               "has learned about the scale", "scaler.scale(loss).backward()")  # fmt: skip
    if backwards and not scales:
        yield ("scaler.scale() was never called: small gradients are lost in FP16, and the scaler has nothing to undo",
               "scaler.scale(loss).backward()")  # fmt: skip
    elif scales < len(backwards):
        yield (f"{len(backwards)} backward passes, but only {scales} loss was scaled: unscale_() divides the sum of "
               "all by the scale, also what was never multiplied by it",
               "scaler.scale(loss).backward() for each micro-batch")  # fmt: skip


def _too_early(step: Step) -> Iterator[Finding]:
    """Calls inside the loop that belong after it."""
    n = step.job.micro_batches
    said = f" PyTorch says: {str(step.error).splitlines()[0]}" if step.error and str(step.error) else ""
    why = {
        "scaler.step": (f"only a part of the batch is in the gradient, and each micro-batch makes a step of its own."
                        f"{said}", "accumulate in the loop, step after it"),
        "optimizer.step": (f"{n} micro-batches are one step.", "accumulate in the loop, then scaler.step(optimizer)"),
        "unscale_": (f"the next backward() adds scaled gradients to unscaled ones. A second call "
                     f"before update() is a RuntimeError.{said}", "once, after the loop, before clipping"),
        "update": (f"the scale may change only between steps, when all gradients have been unscaled.{said}",
                   "once, after scaler.step(optimizer)"),
    }  # fmt: skip
    for what, (reason, hint) in why.items():
        for event in step.all(what):
            if (seen := step.forwards_before(event)) < n:
                name = what if "." in what else f"scaler.{what}"
                yield f"{name}() came after micro-batch {seen} of {n}: {reason}", hint
    for event in step.all("backward")[1:]:
        if event.touched:
            yield ("the gradients were changed between two micro-batches: clipping, or whatever it was, saw a part of "
                   "the batch, still scaled", "unscale_ and clip once, after the loop")  # fmt: skip


def _around_the_scaler(step: Step) -> Iterator[Finding]:
    if direct := step.all("optimizer.step"):
        factor = f", and the gradients were still {step.scale:g} times too large" * (not step.all("unscale_"))
        yield (f"optimizer.step() went around the scaler{factor}: gradients with inf or NaN would go into the "
               "parameters", "scaler.step(optimizer), which skips such a step")  # fmt: skip
    if len(calls := step.all("unscale_")) > 1:
        yield (f"unscale_() was called {len(calls)} times in one step, a RuntimeError: {step.error}",
               "once, after the loop, before clipping")  # fmt: skip
    steps = step.all("scaler.step")
    if step.all("unscale_") and steps:
        order = [e.what for e in step.own.events if not e.by_scaler]
        if order.index("unscale_") > order.index("scaler.step"):
            yield ("unscale_() came after scaler.step(), which has unscaled and used the gradients already: a "
                   "RuntimeError", "backward, unscale_, clip, step, update")  # fmt: skip
        if "update" in order and order.index("update") < order.index("scaler.step"):
            yield ("update() came before scaler.step(): it forgets that the gradients are unscaled, and step() divides "
                   "them by the scale once more", "backward, unscale_, clip, step, update")  # fmt: skip
    if step.error is None and not step.overflow and not (steps or direct):
        yield "no optimizer step was taken", "scaler.step(optimizer) after the loop"
