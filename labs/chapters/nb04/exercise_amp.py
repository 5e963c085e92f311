"""Exercise 04.1: the FP16 training step, watched call by call, beside a reference."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labs.chapters.nb04 import solutions as solution
from labs.kit.check import Mistake

# -- what the function is given: a model, an optimizer and a GradScaler that note what is done with them


Batch = tuple[Tensor, Tensor]
FEATURES, HIDDEN, OUTPUTS = 6, 8, 3


@dataclass(frozen=True, eq=False)
class Event:
    """One call, and how things stood at its start."""

    what: str
    """ "forward", "backward", "scale", "unscale_", "scaler.step", "optimizer.step" or "update"."""
    autocast: torch.dtype | None
    """The format of the autocast that is active on the CPU, if one is."""
    grads: Tensor
    """All gradients as one vector; zeros for parameters without."""
    accumulated: Tensor
    """What backward passes left there: another vector, if something else has changed the gradients since."""
    by_scaler: bool
    """Whether scaler.step() made this call, not the learner."""
    rows: int = 0

    @property
    def touched(self) -> bool:
        return not torch.allclose(self.grads, self.accumulated, equal_nan=True)


class Watched:
    """What `train_step` gets; `events` holds the calls of the latest step."""

    def __init__(self, seed: int, scale: float) -> None:
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.autocast_elsewhere = False
        """Whether the model ran inside an autocast that is for another kind of device than its own."""
        self.autocast_fixed = False
        """Whether it ran inside an autocast for the CPU when it said that it was on a GPU."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = _Model(self)
        self.accumulated: dict[int, Tensor] = {}
        for i, p in enumerate(self.model.parameters()):
            p.register_post_accumulate_grad_hook(self._remember(i))
        self.optimizer = _SGD(self, self.model.parameters(), lr=0.05)
        self.scaler = _Scaler(self, scale)

    def _remember(self, i: int) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            self.accumulated[i] = p.grad.float().flatten().clone()

        return hook

    def run(self, train_step: Callable[..., Any], batches: Sequence[Batch], max_norm: float) -> Exception | None:
        """Take one step; returns what PyTorch, or an assertion in it, had to say against it."""
        self.events.clear()
        arguments = (self.model, self.optimizer, self.scaler, copy.deepcopy(list(batches)), nn.functional.mse_loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train_step(*arguments, max_norm)
            except (RuntimeError, AssertionError) as error:
                return error
            finally:
                self.warnings = [str(w.message) for w in caught]
                self.autocast_elsewhere |= any("is not available" in w for w in self.warnings)
        return None

    def record(self, what: str, rows: int = 0) -> None:
        self.autocast_elsewhere |= torch.is_autocast_enabled("cuda")
        on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.events.append(
            Event(what, dtype if on else None, self.grads(), self._accumulated(), self.scaler.stepping, rows)
        )

    def grads(self) -> Tensor:
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten().clone()
                          for p in self.model.parameters()])  # fmt: skip

    def _accumulated(self) -> Tensor:
        return torch.cat([self.accumulated.get(i, torch.zeros(p.numel()))
                          for i, p in enumerate(self.model.parameters())])  # fmt: skip

    @property
    def applied(self) -> Tensor | None:
        """The gradients that the optimizer used, if scaler.step() let it."""
        return next((e.grads for e in self.events if e.what == "optimizer.step" and e.by_scaler), None)

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])


class _Noticed(torch.autograd.Function):
    """The identity, whose backward is the first thing that backward() runs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, watched: Watched) -> Tensor:
        ctx.watched = watched
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watched.record("backward")
        return grad, None


class _Model(nn.Module):
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
        self._watched = [watched]

    def forward(self, x: Tensor) -> Tensor:
        self._watched[0].record("forward", rows=len(x) if isinstance(x, Tensor) else 0)
        return _Noticed.apply(self.layers(x), self._watched[0])


class _SGD(torch.optim.SGD):
    def __init__(self, watched: Watched, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watched = watched

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._watched.record("optimizer.step")
        return super().step(closure)


class _Scaler(torch.amp.GradScaler):
    def __init__(self, watched: Watched, scale: float) -> None:
        super().__init__("cpu", init_scale=scale)
        self._watched, self.stepping = watched, False

    def scale(self, outputs: Any) -> Any:
        self._watched.record("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._watched.record("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._watched.record("scaler.step")
        self.stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False

    def update(self, new_scale: Any = None) -> None:
        self._watched.record("update")
        super().update(new_scale)


@dataclass(frozen=True)
class Job:
    """So many steps with so many micro-batches each; `overflow` is the step in which a target is far too large."""

    seed: int
    micro_batches: int
    scale: float
    max_norms: tuple[float, ...]
    overflow: int | None = None

    def batches(self, step: int) -> list[Batch]:
        """Equally large micro-batches, no two alike."""
        draw = torch.Generator().manual_seed(100 * self.seed + step)
        batches = [(torch.randn(8, FEATURES, generator=draw), 3 * i + torch.randn(8, OUTPUTS, generator=draw))
                   for i in range(self.micro_batches)]  # fmt: skip
        if step == self.overflow:
            batches[len(batches) // 2][1][0, 0] = 1e8
        return batches


@dataclass(frozen=True)
class Step:
    """A step that the learner's function took, or broke off, and the one that it should have taken."""

    own: Watched
    reference: Watched
    job: Job
    max_norm: float
    scale: float
    before: Tensor
    error: Exception | None
    overflow: bool

    def all(self, what: str, by_scaler: bool = False) -> list[Event]:
        return [e for e in self.own.events if e.what == what and e.by_scaler == by_scaler]

    def forwards_before(self, event: Event) -> int:
        return sum(e.what == "forward" for e in self.own.events[: self.own.events.index(event)])


# -- the checks, in the order in which a step runs


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
    _check_device(f)


def _check_device(f: Function) -> None:
    """Is autocast for the device of the model? All is on the CPU, but here it says that it is on a GPU."""
    own = Watched(4, 64.0)
    with suppress(Exception), _as_if_on_a_gpu():  # an answer that moves something there cannot be tried
        if own.run(f, Job(4, 1, 64.0, (LOOSE,)).batches(0), LOOSE) is None and own.events[0].autocast:
            own.autocast_fixed = True
    if own.autocast_fixed:
        raise Mistake('autocast is for "cpu", whatever the device of the model: on a GPU this trains in FP32',
                      "device_type = next(model.parameters()).device.type")  # fmt: skip


@contextmanager
def _as_if_on_a_gpu() -> Iterator[None]:
    """Within, tensor.device is a GPU for everybody but torch itself."""
    real = torch.Tensor.device

    def device(tensor: Tensor) -> torch.device:
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        return real.__get__(tensor) if asked_by.partition(".")[0] == "torch" else torch.device("cuda")

    torch.Tensor.device = property(device)
    try:
        yield
    finally:
        del torch.Tensor.device  # that of its base class is found again


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
    if steps and not step.error and not step.overflow and not step.all("optimizer.step", by_scaler=True):
        yield ("the optimizer that train_step is given made no step, another one did: what an optimizer keeps from "
               "step to step, such as momentum, would begin anew each time", "scaler.step(optimizer)")  # fmt: skip
    if step.error is None and not step.overflow and not (steps or direct):
        yield "no optimizer step was taken", "scaler.step(optimizer) after the loop"


# -- the numbers: which gradients the optimizer used, and what the step left behind


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
