"""What notebook 04's records say of mixed precision: memory, accuracy and speed."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from labs import amp_memory, amp_training
from labs.amp_memory import NAMES, WHICH, Step
from labs.common.precision.amp import NO_SCALING
from labs.kit.claims import last, runs
from labs.kit.measure import LEVEL, Estimate, estimate
from labs.kit.record import Records
from labs.mixed_precision import amp_report

LEAST_SEEDS = 5


def device(run: Records) -> str:
    """ "CPU" or "GPU"."""
    return "GPU" if run[0].layout["device"] == "cuda" else "CPU"


# -- labs.amp_memory: calculated for large models


def memory(evidence: Records, model: str = "") -> Records:
    """The last launch of the memory lab with a large model, or with this one. LookupError without."""
    for name in [model] if model else [*NAMES]:
        with contextlib.suppress(LookupError):
            return last(evidence, "amp_memory", "predicted_bytes", model=name)
    raise LookupError(f"launch('amp_memory') with {' or '.join([model] if model else NAMES)} is needed")


def bytes_of(run: Records, step: Step, category: str, precision: str) -> float:
    """One category's bytes of a step."""
    return run.one("predicted_bytes", category=category, precision=precision, **step.case).value


def most_of_activations(run: Records) -> dict[str, tuple[float, Step]]:
    """{model and kind of attention: (% of its activations that autocast saves at best, the step that saves most)}."""
    found: dict[str, tuple[float, Step]] = {}
    for step in amp_memory.steps(run):  # the last one of a model is the one that saves most
        fp32, lowered = (bytes_of(run, step, "activations", p) for p in ("fp32", "fp16"))
        name = step.name
        best = max(found.get(name, (-100.0, step))[0], 100 * (1 - lowered / fp32))
        found[name] = best, step
    return found


def peaks(run: Records) -> str:
    """By how much a GPU's peak fell, where both formats really ran with the same batch; empty elsewhere."""
    said = ""
    for r in (r for r in run.where("peak_bytes", precision="fp32") if r.case["model"] in NAMES):
        lowered = run.where("peak_bytes", **{**r.case, "precision": "fp16"})
        if len(lowered):
            step = Step({k: r.case[k] for k in WHICH if k in r.case}, r.value, lowered[0].value)
            said += f" On this GPU {step.saved:.0f} % of the allocator's peak ({step})."
    return said


# -- labs.amp_training: accuracy by format, seed by seed


def trained(evidence: Records) -> Records:
    """The last launch with enough seeds. LookupError if there is none."""
    found = runs(evidence, "amp_training", "test_accuracy", precision="fp32")
    enough = [r for r in found if len(r.where("test_accuracy", precision="fp32")[0].samples) >= LEAST_SEEDS]
    if not enough:
        raise LookupError(f"launch('amp_training') with at least {LEAST_SEEDS} seeds is needed")
    return enough[-1]


def changes(run: Records) -> dict[tuple[str, int], Estimate]:
    """{(format, exponent of the loss's factor): points of accuracy against FP32} of BF16 and of FP16 with scaling.

    LookupError if neither was trained.
    """
    found = amp_training.against_fp32(run)
    points = {key: e.scaled(100, "points") for key, e in found.items() if key[0] in ("bf16", "fp16")}
    if not points:
        raise LookupError("launch('amp_training') with bf16 or fp16 is needed")
    return points


def spread(run: Records, exponent: int) -> float:
    """Points of accuracy between FP32's best and worst seed."""
    return 100 * amp_training.seed_spread(run, exponent)


def relative_changes(run: Records) -> dict[tuple[str, int], Estimate]:
    """As `changes`, in % of FP32's accuracy; the intervals hold one by one."""
    found = {}
    for name, exponent in changes(run):
        lowered, exact = (run.one("test_accuracy", precision=p, loss_exponent=exponent) for p in (name, "fp32"))
        pairs = zip(lowered.samples, exact.samples, strict=True)
        found[name, exponent] = estimate([100 * (a / b - 1) for a, b in pairs], "%")
    return found


def scaling_gains(run: Records) -> dict[int, Estimate]:
    """{exponent of the loss's factor: points of accuracy that GradScaler adds to FP16}, largest factor first.

    The intervals hold all together, as those of `changes`. LookupError if FP16 was not trained both ways.
    """
    plain = sorted(run.where("test_accuracy", precision=NO_SCALING), key=lambda r: -r.case["loss_exponent"])
    if not plain:
        raise LookupError(f"launch('amp_training') with {NO_SCALING!r} is needed")
    found, level = {}, 1 - (1 - LEVEL) / len(plain)
    for r in plain:
        scaled = run.one("test_accuracy", precision="fp16", loss_exponent=r.case["loss_exponent"])
        points = [100 * (a - b) for a, b in zip(scaled.samples, r.samples, strict=True)]
        found[r.case["loss_exponent"]] = estimate(points, "points", level=level)
    return found


def lost(run: Records) -> list[tuple[float, float, str]]:
    """(% of FP16's activation gradients that become 0 without a scale, with one, model), most first.

    Beyond those that are 0 in FP32. LookupError if they were not counted.
    """
    found, in_fp16 = [], run.where("zero_share", of="activations", precision="fp16")
    scale = max((r.case["scale"] for r in in_fp16), default=1.0)
    for r in in_fp16.where(scale=1.0):
        case = {"model": r.case["model"], "of": "activations"}
        flushed = [
            100
            * (
                run.one("zero_share", precision="fp16", scale=s, **case).value
                - run.one("zero_share", precision="fp32", scale=s, **case).value
            )
            for s in (1.0, scale)
        ]
        found.append((*flushed, r.case["model"]))
    if not found:
        raise LookupError("launch('amp_training') with gradients in fp16 is needed")
    return sorted(found, reverse=True)


# -- labs.mixed_precision: time and saved bytes of a step


class Gained(NamedTuple):
    """What FP16 does to a model."""

    model: str
    device: str
    speed: Estimate
    """Time of an FP32 step over that of an FP16 one; a point if FP16 was only modelled"""
    saved: float | None
    """% of the bytes kept for backward; None if it was not run"""

    def __str__(self) -> str:
        if self.saved is None:
            return f"{amp_report.short(self.model)} {self.speed.value:.2g} x the speed (modelled from fewer rows)"
        more = "more" if self.saved < 0 else "fewer"
        return f"{amp_report.short(self.model)} {self.speed} the speed, {abs(self.saved):.0f} % {more} bytes kept"


def gained(evidence: Records) -> list[Gained]:
    """FP16 with GradScaler against FP32, the last run of each model and kind of device; slowest first."""
    found: dict[tuple[str, str], Gained] = {}
    for run in runs(evidence, "mixed_precision", "step_s", precision="fp32"):
        speeds, shares = amp_report.speed_ups(run), amp_report.saved_shares(run)
        for (model, name), speed in speeds.items():
            if name == "fp16":
                found[model, device(run)] = Gained(model, device(run), speed, 100 * shares[model, name])
        for r in (r for r in run.where("skipped_step_s", precision="fp16") if "model" in r.case):
            model = r.case["model"]
            ratio = run.one("step_s", model=model, precision="fp32").value / r.value
            found[model, device(run)] = Gained(model, device(run), Estimate(ratio, ratio, ratio, 1, "x"), None)
    if not found:
        raise LookupError("launch('mixed_precision') with fp16 and a model is needed")
    return sorted(found.values(), key=lambda g: g.speed.value)
