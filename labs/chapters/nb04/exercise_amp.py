"""Exercise 04.1: an epoch with autocast, accumulation, clipping, scaler and scheduler, watched beside a reference."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labs.chapters.nb04 import solutions as solution
from labs.kit.answers import number
from labs.kit.check import Mistake

Function = Callable[..., Any]
Batch = tuple[Tensor, Tensor]
FEATURES, HIDDEN, OUTPUTS = 6, 8, 3


@dataclass(frozen=True)
class Job:
    """An epoch: `rows` of each batch, a first scale (None: BF16, the scaler is off), batches that overflow."""

    seed: int
    rows: tuple[int, ...]
    accumulate: int
    scale: float | None
    max_norm: float
    overflow: tuple[int, ...] = ()
    growth_interval: int = 2000
    """Steps in a row that are taken before the scale grows: GradScaler's default."""

    @property
    def dtype(self) -> torch.dtype:
        """The format that this epoch is to run in."""
        return torch.bfloat16 if self.scale is None else torch.float16

    def batches(self) -> list[Batch]:
        """No two alike; in those that overflow a target is far too large."""
        draw = torch.Generator().manual_seed(self.seed)
        found = [
            (torch.randn(n, FEATURES, generator=draw), 3 * i + torch.randn(n, OUTPUTS, generator=draw))
            for i, n in enumerate(self.rows)
        ]
        for i in self.overflow:
            found[i][1][0, 0] = 1e8
        return found


JOBS = (
    Job(1, (8, 8, 8, 8), 2, 2.0**5, 1e3),
    Job(2, (8, 8, 8, 8, 8), 2, 2.0**5, 12.0),
    Job(3, (8, 6, 2, 8, 8, 4, 8, 3, 5, 7), 3, 2.0**5, 20.0, overflow=(4, 9)),
    Job(4, (8, 4, 8), 2, None, 2.0),
    Job(6, (8, 8, 8, 8), 1, 2.0**5, 1e3, growth_interval=3),
)
"""Plain; a last group that is not full, and clipping; unequal batches and two overflows, so that a count is no yes or
no; BF16; a scale that grows."""


@dataclass
class Seen:
    """What an epoch did."""

    forwards: list[torch.dtype | None] = field(default_factory=list)
    """The format of the autocast that was on, at each forward pass; None outside of any."""
    backward_lowered: bool = False
    applied: list[Tensor] = field(default_factory=list)
    """The gradient that the optimizer used, step by step."""
    lrs: list[float] = field(default_factory=list)
    """The learning rate of each of these steps, then that after the last."""
    around: int = 0
    """Steps of the optimizer that the scaler did not make."""
    unmoved: bool = False
    apart: bool = False
    """Whether loss_fn got an output that was on the GPU and a target that was not."""
    scaler_stepped: bool = False
    batches_left: int = 0
    """In the caller's list, afterwards."""
    scale: float = 1.0
    answer: Any = None
    parameters: Tensor = field(default_factory=lambda: torch.zeros(0))
    warned: list[str] = field(default_factory=list)
    error: Exception | None = None

    def as_well(self, other: Seen) -> bool:
        """Whether both did the same, to FP16's and BF16's rounding."""
        return (
            len(self.applied) == len(other.applied)
            and all(_close(a, b) for a, b in zip(self.applied, other.applied, strict=True))
            and self.lrs == other.lrs
            and self.scale == other.scale
            and _same_number(self.answer, other.answer)
            and bool((self.parameters - other.parameters).norm() <= 1e-3 * other.parameters.norm())
        )


class _Model(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.layers, self._seen = (
            nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)),
            [seen],
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self._seen[0]
        on = torch.is_autocast_enabled("cpu")
        seen.forwards.append(torch.get_autocast_dtype("cpu") if on else None)
        out = self.layers(x)
        out.was_moved = getattr(x, "was_moved", False)
        seen.unmoved |= not out.was_moved
        out.register_hook(self._backward)
        return out

    def _backward(self, grad: Tensor) -> None:
        self._seen[0].backward_lowered |= torch.is_autocast_enabled("cpu")


class _Scaler(torch.amp.GradScaler):
    stepping = stepped = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.stepping = self.stepped = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False


def run(train_epoch: Function, job: Job) -> Seen:
    """Train one epoch on a small model and note what was done."""
    seen = Seen()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        model = _Model(seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = _Scaler(
        "cpu", init_scale=job.scale or 1.0, enabled=job.scale is not None, growth_interval=job.growth_interval
    )

    def note(*_: Any) -> None:
        seen.applied.append(torch.cat([_gradient(p) for p in model.parameters()]))
        seen.lrs.append(optimizer.param_groups[0]["lr"])
        seen.around += not scaler.stepping

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        seen.apart |= getattr(output, "was_moved", False) and not getattr(y, "was_moved", False)
        return nn.functional.mse_loss(output, y)

    optimizer.register_step_pre_hook(note)
    batches = job.batches()
    arguments = (model, optimizer, scheduler, scaler, batches, loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen.answer = train_epoch(*arguments, job.accumulate, job.max_norm)
        except (RuntimeError, AssertionError) as error:
            seen.error = error
    seen.warned = [str(w.message) for w in caught]
    seen.lrs.append(optimizer.param_groups[0]["lr"])
    seen.scale, seen.scaler_stepped, seen.batches_left = scaler.get_scale(), scaler.stepped, len(batches)
    seen.parameters = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return seen


def _gradient(p: Tensor) -> Tensor:
    return torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten().clone()


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 0.02 * b.norm())


def _same_number(a: Any, b: int) -> bool:
    try:
        return float(a) == b
    except (TypeError, ValueError):
        return False


# -- the check


def check_train_epoch(f: Function) -> None:
    """Five epochs, each beside the reference; then one on what says that it is a GPU."""
    for job in JOBS:
        seen, right = run(f, job), run(solution.train_epoch, job)
        for what, hint in _seen_at_once(seen, job):
            raise Mistake(what, hint) from seen.error
        if seen.error is not None:
            raise seen.error
        number(seen.answer, "0, the number of skipped steps")
        if not seen.as_well(right):
            raise Mistake(*(_slip(seen, right, job) or _difference(seen, right, job)))
        for what, hint in _at_whose_cost(seen, job):
            raise Mistake(what, hint)
    _check_device(f)


Finding = tuple[str, str]
"""What was done, and a hint."""


def _seen_at_once(seen: Seen, job: Job) -> Iterator[Finding]:
    name = "FP16" if job.dtype == torch.float16 else "BF16"
    if any("amp.autocast(args...)` is deprecated" in w for w in seen.warned):
        yield "torch.cuda.amp.autocast is deprecated, and it works on no device but cuda", AUTOCAST
    if None in seen.forwards:
        yield "model(x) ran in FP32, outside of any autocast for its device, the CPU", AUTOCAST
    other = [d for d in seen.forwards if d != job.dtype]
    if other:
        scaler = "on" if job.scale else "off"
        yield (
            f"the scaler is {scaler}, and the forward pass ran in {str(other[0])[6:]}, not in {name}",
            "dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16",
        )
    if seen.backward_lowered:
        yield (
            "backward() ran inside autocast; torch's documentation advises against it: backward takes the formats "
            "that forward chose",
            "end the `with` block after the loss",
        )
    if job.scale and seen.around:
        yield (
            "optimizer.step() went around the scaler that was given: it does not look whether the gradients are finite",
            "scaler.step(optimizer), with the argument and no new scaler",
        )
    elif job.scale and seen.error is None and not seen.scaler_stepped:
        yield "the scaler that was given made no step", "scaler.step(optimizer)"


def _at_whose_cost(seen: Seen, job: Job) -> Iterator[Finding]:
    """What an epoch must not do for its right gradients."""
    if len(seen.forwards) < len(job.rows):
        yield (
            f"there are {len(job.rows)} batches, and model(x) ran {len(seen.forwards)} times: a whole group at once "
            "needs the memory that accumulation is there to save",
            "forward and backward of one batch after the other",
        )
    if seen.batches_left != len(job.rows):
        yield (
            f"of the caller's {len(job.rows)} batches {seen.batches_left} are left in the list: the next epoch has "
            "no more than these",
            "leave `batches` as it is: batches[i : i + accumulate]",
        )


AUTOCAST = "with torch.autocast(device.type, dtype=...): around model(x) and loss_fn(...)"


@dataclass(frozen=True)
class Slip:
    """A way to go wrong, by name: `_epoch` does it."""

    name: str
    what: str
    hint: str


SLIPS = (
    Slip(
        "drop",
        "the last group has fewer than `accumulate` batches, and it never made its step",
        "step also after the last batch",
    ),
    Slip(
        "equal",
        "every batch of a group counts the same, however many rows it has: that is no mean over rows",
        "len(x) / rows, where rows is what the whole group holds",
    ),
    Slip(
        "clip early",
        "the gradients were clipped while they were still scaled: next to nothing of them is left",
        "scaler.unscale_(optimizer) first",
    ),
    Slip(
        "always",
        "scheduler.step() ran also after a step that the scaler skipped",
        "the scale falls in update() when the step was skipped: compare get_scale() before and after",
    ),
)


def _epoch(slip: str) -> Function:
    """An epoch with this slip in it."""

    def train_epoch(
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        batches: Sequence[Batch],
        loss_fn: Function,
        accumulate: int,
        max_norm: float,
    ) -> int:
        groups = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        skipped, dtype = 0, torch.float16 if scaler.is_enabled() else torch.bfloat16
        for group in [g for g in groups if len(g) == accumulate or slip != "drop"]:
            optimizer.zero_grad()
            for x, y in group:
                share = 1 / len(group) if slip == "equal" else len(x) / sum(len(x) for x, _ in group)
                with torch.autocast("cpu", dtype):
                    loss = loss_fn(model(x), y) * share
                scaler.scale(loss).backward()
            if slip != "clip early":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            fell = scaler.get_scale() < before
            skipped += fell
            if not fell or slip == "always":
                scheduler.step()
        return skipped

    return train_epoch


def _slip(seen: Seen, right: Seen, job: Job) -> Finding | None:
    """The slip that does all that the answer did, or else its first difference from the reference; None without."""
    found, events = [], _events(seen)
    first = next((i for i, (a, b) in enumerate(zip(events, _events(right), strict=False)) if not _alike(a, b)), None)
    for slip in SLIPS:
        tried = run(_epoch(slip.name), job)
        if tried.error is None and seen.as_well(tried):
            return slip.what, slip.hint
        theirs = _events(tried)
        if tried.error is None and first is not None and first < len(theirs):
            same = all(_alike(a, b) for a, b in zip(events[: first + 1], theirs[: first + 1], strict=True))
            found += [(slip.what, slip.hint)] * same
    return found[0] if found else None


def _events(seen: Seen) -> list[Tensor]:
    """Learning rate and gradient of each step, the last rate, the scale and the answer, in the order of time."""
    steps = [t for lr, g in zip(seen.lrs, seen.applied, strict=False) for t in (torch.tensor([lr]), g)]
    return [*steps, torch.tensor([seen.lrs[-1]]), torch.tensor([seen.scale]), torch.tensor([float(seen.answer)])]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _close(a, b)


def _difference(seen: Seen, right: Seen, job: Job) -> Finding:
    """The first difference from the reference, in numbers."""
    order = "for each group: zero_grad, backward of each batch, unscale_, clip, step, update"
    if len(seen.forwards) != len(job.rows):
        return f"there are {len(job.rows)} batches, and model(x) ran {len(seen.forwards)} times", order
    if len(seen.applied) != len(right.applied):
        return f"the optimizer took {len(seen.applied)} steps, and {len(right.applied)} are right", order
    for i, (a, b) in enumerate(zip(seen.applied, right.applied, strict=True), 1):
        if not _close(a, b):
            return (
                f"step {i} of the optimizer used a gradient of norm {a.norm():.3g}; that of the group's mean over "
                f"rows, clipped to {job.max_norm:g}, has {b.norm():.3g}",
                order,
            )
    if seen.lrs != right.lrs:
        return (
            f"the learning rates of the steps, and the one after them, were {_list(seen.lrs)}; right is "
            f"{_list(right.lrs)}",
            "scheduler.step() after each step that was taken",
        )
    if seen.scale != right.scale:
        return f"the scale ends at {seen.scale:g}, not at {right.scale:g}", "scaler.update() after every scaler.step"
    if not _same_number(seen.answer, right.answer):
        return f"you return {seen.answer!r:.40}, and {right.answer} steps were skipped", "return skipped, an int"
    return "the gradients were right, and the parameters are not what this optimizer makes of them", order


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{n:.3g}" for n in numbers)


# -- devices: all is on the CPU, but here it says that it is on a GPU


def _check_device(f: Function) -> None:
    job = Job(5, (8, 8), 1, 2.0**5, 1e3)
    with _as_if_on_a_gpu():
        seen = run(f, job)
    if seen.forwards and seen.unmoved:
        raise Mistake("the batches stay on the CPU where the model is on a GPU", "x, y = x.to(device), y.to(device)")
    if seen.apart:
        raise Mistake("y stays on the CPU where model(x) is on a GPU", "x, y = x.to(device), y.to(device)")
    if any(seen.forwards):
        raise Mistake(
            'autocast is for "cpu", whatever the device of the model: on a GPU this trains in FP32',
            "device = next(model.parameters()).device, and then device.type",
        )


@contextmanager
def _as_if_on_a_gpu() -> Iterator[None]:
    """Within, parameters say that they are on a GPU, to everybody but torch itself; what moves there stays here."""
    real, real_is_cuda, to, cuda = torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.to, torch.Tensor.cuda

    def pretends(tensor: Tensor) -> bool:
        inside = sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return not inside and (isinstance(tensor, nn.Parameter) or getattr(tensor, "was_moved", False))

    def device(tensor: Tensor) -> torch.device:
        return GPU if pretends(tensor) else real.__get__(tensor)

    def is_cuda(tensor: Tensor) -> bool:
        return pretends(tensor) or real_is_cuda.__get__(tensor)

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied = tensor.clone()
        copied.was_moved = True
        return copied

    def pretend_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = [*args, *kwargs.values()]
        gpu = any(str(a).startswith("cuda") or a is GPU for a in asked if isinstance(a, str | torch.device))
        like = any(isinstance(a, nn.Parameter) for a in asked)
        return moved(tensor) if gpu or like else to(tensor, *args, **kwargs)

    torch.Tensor.device, torch.Tensor.is_cuda = property(device), property(is_cuda)
    torch.Tensor.to, torch.Tensor.cuda = pretend_to, moved
    try:
        yield
    finally:
        del torch.Tensor.device, torch.Tensor.is_cuda  # those of the base class are found again
        del torch.Tensor.to, torch.Tensor.cuda
        assert torch.Tensor.to is to and torch.Tensor.cuda is cuda


GPU = torch.device("cuda")
