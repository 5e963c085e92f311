"""Exercises of notebook 04: train an epoch in FP16 or BF16, diagnose a GradScaler from its log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from labs.kit.exercise import Exercise, KnownMistake
from labs.loss_scaling import make_batch, perceptron

Answer = Callable[..., Any]
Batch = tuple[Tensor, Tensor]


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler,
    batches: Sequence[Batch],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    accumulate: int,
    max_norm: float,
) -> int:
    """Step once per `accumulate` batches, in FP16 if the scaler is enabled, else BF16; return the skipped steps."""
    device = next(model.parameters()).device
    dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16
    skipped = 0
    for first in range(0, len(batches), accumulate):
        group = batches[first : first + accumulate]  # the last one may be smaller
        rows = sum(len(x) for x, _ in group)
        optimizer.zero_grad()
        for x, y in group:
            x, y = x.to(device), y.to(device)
            with torch.autocast(device.type, dtype):
                loss = loss_fn(model(x).float(), y) * (len(x) / rows)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:  # the step was skipped because a gradient was inf or NaN
            skipped += 1
        else:
            scheduler.step()
    return skipped


def _epoch(mistake: str) -> Answer:
    """Return an epoch with one mistake."""

    def epoch(
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        batches: Sequence[Batch],
        loss_fn: Answer,
        accumulate: int,
        max_norm: float,
    ) -> int:
        skipped, device = 0, next(model.parameters()).device
        dtype = torch.float16 if scaler.is_enabled() else torch.bfloat16
        groups = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
        for group in [g for g in groups if len(g) == accumulate or mistake != "last group dropped"]:
            optimizer.zero_grad()
            for x, y in group:
                share = len(x) / sum(len(x) for x, _ in group)
                with torch.autocast(device.type, dtype):
                    loss = loss_fn(model(x.to(device)), y.to(device))
                scaler.scale(loss * (1 / len(group) if mistake == "equal batches" else share)).backward()
            if mistake != "clipped early":
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), max_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            fell = scaler.get_scale() < scale
            skipped += fell
            if not fell or mistake == "scheduler always":
                scheduler.step()
        return skipped

    return epoch


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # no MPS: the check needs FP64


class _Model(nn.Module):
    """A small, smooth model that notes the autocast format around each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.formats: list[str] = []
        self.lowered_backward = False

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, 6) to (rows, 3)."""
        on = torch.is_autocast_enabled(DEVICE.type)
        self.formats.append(str(torch.get_autocast_dtype(DEVICE.type))[6:] if on else f"no autocast for {DEVICE.type}")
        out = self.layers(x)
        out.register_hook(self._backward)
        return out

    def _backward(self, gradient: Tensor) -> None:
        self.lowered_backward |= torch.is_autocast_enabled(DEVICE.type)


class _Scaler(torch.amp.GradScaler):
    stepping = False

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False


JOBS: dict[str, tuple[tuple[int, ...], int, float | None, float, tuple[int, ...]]] = {
    "FP16": ((8, 8, 8, 8), 2, 2.0**5, 1e3, ()),
    "FP16, five batches, clipped": ((8, 8, 8, 8, 8), 2, 2.0**5, 12.0, ()),
    "FP16, unequal batches, two overflows": ((8, 6, 2, 8, 8, 4, 8, 3, 5, 7), 3, 2.0**5, 20.0, (4, 9)),
    "BF16": ((8, 4, 8), 2, None, 2.0, ()),
}
"""(rows of each batch, accumulate, first scale (None: BF16), max_norm, batches that overflow)."""


def observe_epoch(answer: Answer) -> dict[str, Any]:
    """Return what epochs do: formats, gradients that the optimizer used, learning rates, skipped steps."""
    seen: dict[str, Any] = {}
    for name in JOBS:
        seen |= {f"{name}: {what}": value for what, value in _observed(answer, name).items()}
    return seen


def _observed(answer: Answer, job: str) -> dict[str, Any]:
    found, right = _train(answer, job), _right(job)
    steps = list(zip(found["applied"], right["applied"], strict=False))
    returned = found["returned"]
    return {
        "format of each forward pass": found["formats"],
        "backward() ran under autocast": found["lowered_backward"],
        "optimizer steps that scaler.step did not take": found["outside"],
        "optimizer steps": len(found["applied"]),
        "length of each step's gradient, right = 1": [round(float(a.norm() / b.norm()), 1) for a, b in steps],
        "each step's gradient has the right direction": [
            float(a @ b) > 0.999 * float(a.norm() * b.norm()) for a, b in steps
        ],
        "learning rate of each step, and after the last": found["rates"],
        "scale at the end": found["scale"],
        "skipped steps that you return": int(returned) if isinstance(returned, int | float | Tensor) else returned,
    }


@cache
def _right(job: str) -> dict[str, Any]:
    return _train(train_epoch, job)


def _train(answer: Answer, job: str) -> dict[str, Any]:
    """Train one epoch on a small model and note what the optimizer got."""
    rows, accumulate, scale, max_norm, overflow = JOBS[job]
    seed = list(JOBS).index(job)
    draw = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(n, 6, generator=draw), 3 * i + torch.randn(n, 3, generator=draw)) for i, n in enumerate(rows)
    ]
    for i in overflow:
        batches[i][1][0, 0] = 1e8
    torch.manual_seed(seed)
    model = _Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = _Scaler(DEVICE.type, init_scale=scale or 1.0, enabled=scale is not None)
    applied, rates, outside = [], [], []

    def note(*_: Any) -> None:
        applied.append(torch.cat([p.grad.double().flatten() for p in model.parameters()]))
        rates.append(optimizer.param_groups[0]["lr"])
        outside.extend([1] * (scale is not None and not scaler.stepping))

    optimizer.register_step_pre_hook(note)
    returned = answer(model, optimizer, scheduler, scaler, batches, mse_loss, accumulate, max_norm)
    return {
        "formats": model.formats,
        "lowered_backward": model.lowered_backward,
        "applied": applied,
        "rates": [*rates, optimizer.param_groups[0]["lr"]],
        "outside": len(outside),
        "scale": scaler.get_scale(),
        "returned": returned,
    }


Log = list[dict[str, Any]]
STEPS, MAX_NORM, SPIKE = 16, 4.0, 2.0**16
TOO_LARGE = 2.0**22  # a first scale that overflows here


def training_log(diagnosis: str, seed: int, scale: float = SPIKE, overflow: int | None = 5, factor: float = 1.0) -> Log:
    """Train a perceptron in FP16; return a row per step: step, loss, norm, scale, skipped.

    The loss is multiplied by `factor`, and in step `overflow` also by SPIKE, so that FP16 overflows.
    """
    torch.manual_seed(seed)
    model, steps = perceptron(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scaler, log = torch.amp.GradScaler("cpu", init_scale=scale), []
    for i in range(STEPS):
        x, y = make_batch(8)
        if diagnosis == "new scaler every step":
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if diagnosis != "no zero_grad":
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y) * factor
        before, used = len(steps), scaler.get_scale()
        scaler.scale(loss * (SPIKE if i == overflow else 1.0)).backward()
        if diagnosis != "clip before unscale_":
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        row = {"step": i, "loss": loss.item(), "norm": norm.item(), "scale": used, "skipped": len(steps) == before}
        log.append(row)
    return log


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fine", {}),
    ("fine", {"overflow": None}),
    ("fine", {"scale": TOO_LARGE, "overflow": None}),
    ("fine", {"factor": 30.0, "scale": 2.0**13, "overflow": None}),
    ("no zero_grad", {}),
    ("no zero_grad", {"overflow": 11}),
    ("no zero_grad", {"overflow": 0}),
    ("clip before unscale_", {}),
    ("clip before unscale_", {"scale": TOO_LARGE, "overflow": None}),
    ("clip before unscale_", {"scale": 2.0**11}),
    ("new scaler every step", {"scale": TOO_LARGE, "overflow": None}),
    ("new scaler every step", {"scale": 4 * TOO_LARGE}),
    ("new scaler every step", {}),
)
"""Different faults can have the same skipped steps, fall of the scale or first step."""
SHOWN = (("clip before unscale_", {}), ("fine", {}), CASES[-3], ("no zero_grad", {}))
"""The notebook's four logs, A to D."""


def logs() -> dict[str, Log]:
    """Return the notebook's four training logs, steps 3 to 10."""
    shown = zip("ABCD", SHOWN, strict=True)
    return {letter: training_log(kind, 0, **settings)[3:11] for letter, (kind, settings) in shown}


def diagnose(log: Sequence[dict]) -> str:
    """Return what is wrong with an FP16 training run, from its log."""
    taken = [row for row in log if not row["skipped"]]
    if any(row["skipped"] and after["scale"] >= row["scale"] for row, after in pairwise(log)):
        return "new scaler every step"  # a persistent scaler would have halved its scale
    if all(row["skipped"] for row in log[-4:]):
        return "no zero_grad"  # an overflow that never ends
    if any(row["norm"] > 500 for row in taken):
        return "clip before unscale_"  # a norm as large as the scale
    return "fine"


def _skipped_is_a_fault(log: Sequence[dict]) -> str:
    found = diagnose(log)
    return "no zero_grad" if found == "fine" and any(row["skipped"] for row in log) else found


def _constant_scale_is_a_fault(log: Sequence[dict]) -> str:
    return "new scaler every step" if len({row["scale"] for row in log}) == 1 else diagnose(log)


def _long_is_scaled(log: Sequence[dict]) -> str:
    found = diagnose(log)
    return "clip before unscale_" if found == "fine" and max(row["norm"] for row in log) > 10 * MAX_NORM else found


@cache
def _hidden_logs() -> list[Log]:
    return [training_log(truth, seed, **settings) for seed, (truth, settings) in enumerate(CASES, 1)]


def observe_diagnose(answer: Answer) -> dict[str, Any]:
    """Return the answer's diagnosis of each log."""
    seen = {}
    for number, log in enumerate(_hidden_logs(), start=1):
        skipped = [row["step"] for row in log if row["skipped"]]
        which = f"steps {skipped[0]} to {skipped[-1]} skipped" if len(skipped) > 1 else f"step {skipped} skipped"
        norms = [row["norm"] for row in log if not row["skipped"]] or [0.0]
        where = (
            f"log {number} ({which if skipped else 'no step skipped'}, scale {log[0]['scale']:,.0f} to "
            f"{log[-1]['scale']:,.0f}, norm of a step that was taken up to {max(norms):,.0f})"
        )
        seen[where] = answer([dict(row) for row in log])
    return seen


EXERCISES = {
    "04.1": Exercise(
        "04.1",
        30,
        "train an epoch in FP16 or BF16",
        observe_epoch,
        train_epoch,
        (
            KnownMistake(
                "The last group has fewer than `accumulate` batches, and it makes no step.",
                "Step also after the last batch.",
                _epoch("last group dropped"),
            ),
            KnownMistake(
                "Every batch of a group counts the same, however many rows it has.",
                "Weigh each batch's loss by `len(x) / rows`, with the rows of the whole group.",
                _epoch("equal batches"),
            ),
            KnownMistake(
                "The gradients are clipped while they are still scaled, so they become far too short.",
                "Call `scaler.unscale_(optimizer)` first.",
                _epoch("clipped early"),
            ),
            KnownMistake(
                "The learning rate also falls after a step that the scaler skipped.",
                "A skipped step lowers the scale in `update()`: compare `get_scale()` before and after.",
                _epoch("scheduler always"),
            ),
        ),
    ),
    "04.3": Exercise(
        "04.3",
        20,
        "diagnose a training log",
        observe_diagnose,
        diagnose,
        (
            KnownMistake(
                "A skipped step alone is no fault.",
                "In a sound run, steps are taken again once the scale has fallen.",
                _skipped_is_a_fault,
            ),
            KnownMistake(
                "A scale that stays where it is is no fault while no step is skipped.",
                "Look at the scale of the step after a skipped one.",
                _constant_scale_is_a_fault,
            ),
            KnownMistake(
                "A norm above `max_norm` is no fault: that is what clipping is for.",
                "Scaled norms are as large as the scale. Leave out skipped steps, whose norm is inf or nan.",
                _long_is_scaled,
            ),
        ),
    ),
}
