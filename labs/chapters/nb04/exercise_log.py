"""Exercise 04.3: logs of FP16 trainings, one sound and three with a fault, and a function that has to tell which."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from labs.kit.check import Mistake
from labs.loss_scaling.loss_scaling_trial import SPIKE, perceptron

FINE, NO_ZERO_GRAD, CLIP_SCALED, NEW_SCALER = "fine", "no zero_grad", "clip before unscale_", "new scaler every step"
DIAGNOSES = (FINE, NO_ZERO_GRAD, CLIP_SCALED, NEW_SCALER)
STEPS, MAX_NORM = 16, 4.0
TOO_LARGE = 2.0**22  # overflows here

Log = list[dict[str, Any]]


def training_log(
    diagnosis: str, seed: int, scale: float = 2.0**16, overflow: int | None = 5, factor: float = 1.0
) -> Log:
    """Train a perceptron for STEPS steps in FP16 and keep a row for each: step, loss, norm, scale, skipped.

    `norm` is what clip_grad_norm_ returned, `scale` that of the step. The loss is multiplied by `factor`, and in the
    step `overflow` by so much more that FP16 overflows.
    """
    torch.manual_seed(seed)
    workload = perceptron()
    model, steps = workload.module, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 / factor)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    scaler, log = torch.amp.GradScaler("cpu", init_scale=scale), []
    for i in range(STEPS):
        x, y = workload.make_batch(8)
        if diagnosis == NEW_SCALER:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if diagnosis != NO_ZERO_GRAD:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = workload.loss(model(x), y) * factor
        before, used = len(steps), scaler.get_scale()
        scaler.scale(loss * (SPIKE if i == overflow else 1.0)).backward()
        if diagnosis != CLIP_SCALED:
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        log.append(
            {"step": i, "loss": loss.item(), "norm": norm.item(), "scale": used, "skipped": len(steps) == before}
        )
    return log


def print_logs() -> None:
    """Four logs, one of each kind, in an order that says nothing."""
    kinds = {
        "A": (CLIP_SCALED, {}),
        "B": (FINE, {}),
        "C": (NEW_SCALER, {"scale": TOO_LARGE, "overflow": None}),
        "D": (NO_ZERO_GRAD, {}),
    }
    for letter, (diagnosis, settings) in kinds.items():
        print(f"log {letter}\nstep   loss     norm        scale  skipped")
        for row in training_log(diagnosis, seed=0, **settings)[3:11]:
            print(f"{row['step']:4} {row['loss']:6.2f} {row['norm']:8.3g} {row['scale']:12,.0f}  {row['skipped']}")
        print()


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (FINE, {}),
    (FINE, {"overflow": None}),
    (FINE, {"scale": TOO_LARGE, "overflow": None}),
    (FINE, {"factor": 30.0, "scale": 2.0**13, "overflow": None}),
    (FINE, {"overflow": 9}),
    (NO_ZERO_GRAD, {}),
    (NO_ZERO_GRAD, {"overflow": 11}),
    (NO_ZERO_GRAD, {"overflow": 0}),
    (CLIP_SCALED, {}),
    (CLIP_SCALED, {"scale": TOO_LARGE, "overflow": None}),
    (CLIP_SCALED, {"scale": 2.0**11}),
    (NEW_SCALER, {"scale": TOO_LARGE, "overflow": None}),
    (NEW_SCALER, {"scale": 4 * TOO_LARGE}),
    (NEW_SCALER, {}),
    (NEW_SCALER, {"overflow": 9}),
)
"""How many steps are skipped, how far the scale falls and what the first step does are alike for different faults."""

WHY = {
    (FINE, NO_ZERO_GRAD): "a step that is skipped is no fault: here the steps after it are taken again",
    (FINE, NEW_SCALER): "the scale may stay where it is: nothing has to change it while no step is skipped, and where "
    "one is, it falls",
    (FINE, CLIP_SCALED): "a norm above max_norm is no fault, and that of a skipped step may be inf: in no step that "
    "was taken is it as large as the scale",
    (NO_ZERO_GRAD, FINE): "after the overflow no step is taken any more: the infinite gradient is still there",
    (NO_ZERO_GRAD, NEW_SCALER): "the scale falls from step to step: the scaler remembers",
    (NO_ZERO_GRAD, CLIP_SCALED): "the norms before the overflow are of ordinary size; after it they are not finite",
    (CLIP_SCALED, FINE): "clipping saw a norm about as large as the scale: the gradients were still scaled",
    (CLIP_SCALED, NO_ZERO_GRAD): "steps are taken again after the overflow, but look at the norms of those",
    (CLIP_SCALED, NEW_SCALER): "the scale falls where a step is skipped; look at the norms",
    (NEW_SCALER, FINE): "after a step that is skipped the scale is as large as before: what update() halves is thrown "
    "away",
    (NEW_SCALER, NO_ZERO_GRAD): "steps are skipped, yet the scale never falls: what update() halves is thrown away",
    (NEW_SCALER, CLIP_SCALED): "the norms of the steps that are taken, if any, are of ordinary size: look at the scale "
    "after a step that is skipped",
}
"""By (what it was, what was said)."""


@cache
def _logs() -> list[Log]:
    return [training_log(truth, seed, **settings) for seed, (truth, settings) in enumerate(CASES, 1)]


def check_diagnose(f: Callable[..., Any]) -> None:
    """Logs of new trainings, of each kind several."""
    for (truth, _), log in zip(CASES, _logs(), strict=True):
        said = f([dict(row) for row in log])
        if not isinstance(said, str) or said not in DIAGNOSES:
            raise Mistake(f"you return {said!r:.60}", f"return one of {', '.join(map(repr, DIAGNOSES))}")
        if said != truth:
            raise Mistake(
                f"{_facts(log)}. This one is {truth!r}, and you say {said!r}: {WHY[truth, said]}",
                "print_logs() shows one of each",
            )


def _facts(log: Log) -> str:
    skipped = sum(row["skipped"] for row in log)
    norms = [row["norm"] for row in log if not row["skipped"]]
    told = f", norm of the others {median(norms):.3g} in the middle" if norms else ""
    return (
        f"a log with {skipped} of {len(log)} steps skipped{told}, scale from {log[0]['scale']:,.0f} to "
        f"{log[-1]['scale']:,.0f}"
    )
