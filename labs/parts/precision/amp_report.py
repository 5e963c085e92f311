"""What the records of `mixed_precision` say of each format: speed, memory, and one line of advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labs.kit import measure
from labs.kit.measure import Estimate
from labs.kit.record import Records
from labs.parts.precision.amp import NO_SCALING

SAFE = 0.1  # an error is small if it is less than this share of what changes from one batch to the next
LOST = 1e-3  # share of a gradient's elements that may become 0 before scaling is called for
WORTH = 0.05  # least share of speed or of bytes that is called a gain


@dataclass(frozen=True)
class Effect:
    """What a format does to a model, against the baseline."""

    speed_up: Estimate
    """Time of the baseline's step over that of this format's."""
    saved_share: float
    """Part of the baseline's saved bytes that this format does not need; negative if it needs more."""
    gradient_error: float | None
    """Relative to FP32's gradient; None if it is not finite at any scale."""
    underflow_share: float = 0.0
    """Elements of the gradient that become 0."""


def advice(effects: Mapping[str, Effect], noise: float, baseline: str = "fp32") -> str:
    """One line on BF16, FP16 and the gain, from `effects` by format; a format that is not there is left out.

    `noise` is the relative difference between the gradients of two batches: an error far below it is lost in it.
    """
    said = [_on_bf16(effects["bf16"], noise)] if "bf16" in effects else []
    if "fp16" in effects:
        said.append(_on_fp16(effects["fp16"], effects.get(NO_SCALING), noise))
    return " ".join([*said, _on_gain({n: e for n, e in effects.items() if n in ("bf16", "fp16")}, baseline)])


def _on_bf16(bf16: Effect, noise: float) -> str:
    if bf16.gradient_error is None:
        return "BF16 is not safe: loss or gradient are not finite."
    off = f"its gradient is off by {_percent(bf16.gradient_error)}, batches differ by {_percent(noise)}"
    if bf16.gradient_error <= SAFE * noise:
        return f"BF16 is safe: {off}."
    return f"BF16 is coarse here: {off}; compare final accuracies."


def _on_fp16(scaled: Effect, plain: Effect | None, noise: float) -> str:
    if scaled.gradient_error is None:
        return "FP16 overflows whatever the scale: take another format."
    if plain is None:
        return "FP16: keep GradScaler."
    lost = f"{_percent(plain.underflow_share)} of the gradient's elements become 0 without it"
    error = plain.gradient_error
    worse = error is None or error > max(2 * scaled.gradient_error, SAFE * noise)
    if plain.underflow_share - scaled.underflow_share > LOST or worse:
        return f"FP16 needs scaling: {lost}, {_percent(scaled.underflow_share)} with it."
    return f"FP16 shows no need of scaling yet ({lost}): keep it, gradients shrink as training goes on."


def _on_gain(lowered: Mapping[str, Effect], baseline: str) -> str:
    usable = {n: e for n, e in lowered.items() if e.gradient_error is not None}
    if not usable:
        return f"No 16-bit format was compared with {baseline.upper()}."
    name, best = max(usable.items(), key=lambda item: item[1].speed_up.value)
    faster, smaller = best.speed_up.low > 1 + WORTH, max(e.saved_share for e in usable.values()) > WORTH
    kept = ", ".join(
        f"{n.upper()} keeps {_percent(abs(e.saved_share))} {'less' if e.saved_share >= 0 else 'more'}"
        for n, e in usable.items()
    )
    told = f"{name.upper()} runs at {best.speed_up} the speed of {baseline.upper()}; for backward {kept}."
    if faster:
        return f"AMP gains speed{' and memory' if smaller else ''}: {told}"
    if not smaller:
        return f"AMP gains nothing here: {told}"
    return f"AMP {'pays for memory with time' if best.speed_up.high < 1 else 'gains memory only'}: {told}"


def _percent(share: float) -> str:
    """Two digits: "0.12 %", "133 %"; "0 %" for none at all."""
    return f"{100 * share:.0f} %" if share >= 1 else f"{100 * share:.2g} %"


def short(name: str) -> str:
    """A model's name without the module of its factory."""
    return name.rpartition(":")[2]


def speed_ups(records: Records, baseline: str = "fp32") -> dict[tuple[str, str], Estimate]:
    """Time of the baseline's step over that of each other format's, pair by pair, by (model, format)."""
    found = {}
    for r in (r for r in records.where("step_s") if "model" in r.case and r.case["precision"] != baseline):
        base = records.where("step_s", model=r.case["model"], precision=baseline)
        if len(base):
            found[r.case["model"], r.case["precision"]] = measure.paired_ratio(base[0].samples, r.samples)
    return found


def saved_shares(records: Records) -> dict[tuple[str, str], float]:
    """Part of FP32's saved bytes that a format does not keep, by (model, format); negative if it keeps more."""
    found = {}
    for r in records.where("saved_bytes"):
        base = records.one("saved_bytes", model=r.case["model"], precision="fp32")
        found[r.case["model"], r.case["precision"]] = 1 - r.value / base.value
    return found


def report(records: Records) -> dict[str, object]:
    """What an engineer asks of the one model in `records`: {"baseline", "noise", "effects" by format, "advice"}.

    The baseline is TF32 where that is faster than FP32: a gain "over FP32" may be what TF32 gives without AMP.
    """
    model = records.where("batch_noise")[0].case["model"]
    tf32 = speed_ups(records).get((model, "tf32"))
    baseline = "tf32" if tf32 is not None and tf32.low > 1 else "fp32"
    speeds, shares = speed_ups(records, baseline), saved_shares(records)
    effects = {}
    for (_, name), share in shares.items():
        if name != baseline:
            effects[name] = _effect(records, name, speeds[model, name], share)
    if "fp16" in effects:
        effects[NO_SCALING] = _effect(records, NO_SCALING, speeds[model, "fp16"], shares[model, "fp16"])
    noise = records.one("batch_noise").value
    said = advice(effects, noise, baseline)
    for r in records.where("skipped_step_s", model=model):
        said += f" {r.case['precision'].upper()} was left out: its steps would take longer than the budget."
    for r in records.where("not_possible", model=model):
        said += f" {r.case['precision'].upper()} is not possible here: {r.case['why']}"
    return {"baseline": baseline, "noise": noise, "effects": effects, "advice": said}


def _effect(records: Records, name: str, speed_up: Estimate, share: float) -> Effect:
    """With the last scale that was tried, the first at which nothing overflows."""
    lost, errors = records.where("underflow_share", precision=name), records.where("gradient_error", precision=name)
    error = errors[-1].value if len(errors) else (0.0 if name == "fp32" else None)
    return Effect(speed_up, share, error, lost[-1].value if len(lost) else 0.0)
