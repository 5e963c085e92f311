"""Verdicts of notebook 04, from records of amp_training, loss_scaling, mixed_precision and amp_memory."""

from __future__ import annotations

from labs import amp_memory, amp_training, loss_scaling, mixed_precision
from labs.claims.registry import Verdict, ends, last, verdict, verdict_for, verdict_word
from labs.common.sources import on_gpus
from labs.kit.record import Records

ABOUT_20 = (0.15, 0.25)
GB_24, GB_12, NEAR = 24e9, 12e9, 0.1


def _memory(records: Records) -> dict[int, tuple[float, float]]:
    """Return {batch: (FP32, autocast) peak bytes} of the last amp_memory."""
    peaks = amp_memory.peaks(last(records, "amp_memory", "peak_bytes", format="fp32"))
    return {n: (size, peaks["bf16", n]) for (name, n), size in sorted(peaks.items()) if ("bf16", n) in peaks}


@verdict("A30")
def a30_autocast_saves_about_20_percent(records: Records) -> Verdict:
    """Holds if every batch of BERT-large saves 15 to 25 % of the peak."""
    saved = {n: 1 - lowered / full for n, (full, lowered) in _memory(records).items()}
    near = [ABOUT_20[0] <= share <= ABOUT_20[1] for share in saved.values()]
    said = ends([f"{share:.0%} ({n} sequences)" for n, share in saved.items()])
    because = f"of the peak of BERT-large with AdamW, autocast saves {said}: {sum(near)} of {len(near)} about 20 %"
    return Verdict(verdict_word(near, [not n for n in near]), because, "modelled")


@verdict("B10")
def b10_bert_large_from_24_to_12_gb(records: Records) -> Verdict:
    """Holds if the batch whose FP32 peak is nearest to 24 GB needs 12 GB under autocast, within 10 %."""
    n, (full, lowered) = min(_memory(records).items(), key=lambda item: abs(item[1][0] - GB_24))
    if abs(full / GB_24 - 1) > NEAR:
        raise LookupError("launch('amp_memory') with a batch whose peak is about 24 GB is needed")
    because = f"{n} sequences: the peak falls from {full / 1e9:.1f} to {lowered / 1e9:.1f} GB; states don't shrink"
    return Verdict("holds" if lowered <= (1 + NEAR) * GB_12 else "does not hold", because, "modelled")


def _steps(run: Records, case: str) -> int:
    return int(run.one("count", case=case, sign="steps taken").value)


@verdict("B09")
@verdict("E18")
def b09_a_loop_without_zero_grad_is_complete(records: Records) -> Verdict:
    """Holds if the loop trains as FP32 does, from a scale that overflows at first."""
    case = "no zero_grad"
    run = last(records, "loss_scaling", "weight_error", case=case)
    if not loss_scaling.as_fp32(run, "right"):
        return Verdict("depends", "the right loop differs from FP32 here as well")
    because = (
        f"without zero_grad, an overflow stays in .grad: {_steps(run, case)} of {run[0].config['steps']} steps are "
        f"taken, with it {_steps(run, 'right')}"
    )
    return Verdict("holds" if loss_scaling.as_fp32(run, case) else "does not hold", because)


@verdict("E20")
def e20_four_calls_make_a_step(records: Records) -> Verdict:
    """Holds if clipping without a preceding unscale_ trains as FP32 does."""
    case = "clip before unscale_"
    run = last(records, "loss_scaling", "weight_error", case=case)
    moved = run.one("count", case=case, sign="distance moved, FP32 = 1").value
    if not loss_scaling.as_fp32(run, "right"):
        return Verdict("does not hold", "the right step, with clipping after unscale_, differs from FP32")
    because = (
        f"without clipping they are; clipped before unscale_, the weights move {moved:.1g} times as far as in FP32"
    )
    return Verdict("holds" if loss_scaling.as_fp32(run, case) else "depends", because)


@verdict("E19")
def e19_gradscaler_keeps_fp16_stable(records: Records) -> Verdict:
    """Holds if it brings FP16's gradient nearer to FP32's at every batch size, and survives an overflow."""
    run = last(records, "amp_training", "gradient_error")
    scaled = last(records, "loss_scaling", "weight_error", case="right")
    found = amp_training.errors(run)
    sizes = sorted({tokens for tokens, _ in found})
    plain, with_scaler = ([found[n, way] for n in sizes] for way in (amp_training.UNSCALED, amp_training.SCALED))
    survives = loss_scaling.as_fp32(scaled, "right")
    skipped = int(sum(scaled.one("skipped", case="right").samples))
    because = (
        f"FP16's gradient of {sizes[-1]:,} tokens is {100 * plain[-1]:.2g} % off FP32's without it and "
        f"{100 * with_scaler[-1]:.2g} % with it; training that overflows {skipped} times ends "
        f"{'as' if survives else 'not as'} in FP32"
    )
    better = [b < a for a, b in zip(plain, with_scaler, strict=True)]
    return verdict_for([survives, *better], [not survives, *(not b for b in better)], because)


@verdict("E16")
def e16_fp16_speeds_up_training(records: Records) -> Verdict:
    """Holds if FP16's steps are faster for all models. A CPU alone can't refute what an article says about GPUs."""
    run = last(records, "mixed_precision", "step_s", precision="fp16")
    speeds = {model: s for (model, f), s in mixed_precision.speedups(run).items() if f == "fp16"}
    on_cpu = run[0].layout["device"] == "cpu"
    said = f"a step in FP16 has {_ends(speeds)} of FP32's speed on {'this CPU' if on_cpu else 'this GPU'}"
    for gpu in on_gpus.runs("mixed_precision") if on_cpu else ():
        models = {model: s for (model, f), s in mixed_precision.speedups(gpu).items() if f == "fp16"}
        products = mixed_precision.product_speedups(gpu, "fp16", casts=True)
        side, where = max(products), ", ".join(gpu.provenance["gpus"])
        said += f"; recorded on {where}: small models {_ends(models)}, products of side {side} {products[side]}"
    right, wrong = [s.low > 1 for s in speeds.values()], [s.high < 1 for s in speeds.values()]
    return Verdict("depends", said) if on_cpu and all(wrong) else verdict_for(right, wrong, said)


def _ends(speeds: dict) -> str:
    return ends([str(speed) for speed in sorted(speeds.values(), key=lambda e: e.value)])
