"""Verdicts of notebook 04: what its records say of the articles' statements on mixed precision."""

from __future__ import annotations

import contextlib
from itertools import pairwise

from labs import amp_memory
from labs.chapters.nb04 import claims_amp as amp
from labs.chapters.nb04 import claims_amp_step as amp_step
from labs.chapters.nb04 import published_speed
from labs.common.sources import on_gpus
from labs.kit.claims import Verdict, depends, judged, last, only_on, verdict, within, word
from labs.kit.claims import ends as ends_of
from labs.kit.measure import Estimate, differs
from labs.kit.record import Records
from labs.mixed_precision import amp_report, matmul_ladder

ABOUT_20 = (15.0, 25.0)  # %
ABOUT_50 = (45.0, 50.0)  # %, what "up to 50 %" must come to somewhere
GB_24, GB_12 = 24e9, 12e9
NEAR = 0.1  # relative: which memory counts as these
NO_GAIN = 1.0  # points of accuracy up to which scaling brings nothing
ONE = "one perceptron that learns Fashion-MNIST,"
TWO_PERCENT, POINT = 2.0, 0.5  # %: what is lost if 98 % are kept, and how near to that is that


@verdict("A30")
def _(evidence: Records) -> Verdict:
    run = amp.memory(evidence)
    steps = amp_memory.steps(run)
    near = [ABOUT_20[0] <= s.saved <= ABOUT_20[1] for s in steps]
    because = (
        f"{sum(near)} of {len(near)} cases are between {ABOUT_20[0]:g} and {ABOUT_20[1]:g} %, from "
        f"{ends_of([f'{s.saved:.0f} % ({s})' for s in steps])}.{amp.peaks(run)}"
    )
    return Verdict(word(near, [not n for n in near]), because, "modelled")


@verdict("B07")
def _(evidence: Records) -> Verdict:
    found = amp.most_of_activations(amp.memory(evidence))
    said = "; ".join(
        f"{name} {of_activations:.0f} % of activations, {s.saved:.0f} % of all"
        for name, (of_activations, s) in found.items()
    )
    near = [ABOUT_50[0] <= of_activations <= ABOUT_50[1] for of_activations, _ in found.values()]
    because = f"At most: {said}."
    return Verdict(word(near, [not n for n in near]), because, "modelled")


@verdict("B10")
def _(evidence: Records) -> Verdict:
    run = amp.memory(evidence, "bert_large")
    steps = [s for s in amp_memory.steps(run) if s.case["model"] == "bert_large" and abs(s.fp32 / GB_24 - 1) <= NEAR]
    if not steps:
        raise LookupError("launch('amp_memory') with a batch of BERT-large that takes about 24 GB is needed")
    halved = [s.lowered <= (1 + NEAR) * GB_12 for s in steps]
    s = min(steps, key=lambda s: abs(s.fp32 - GB_24))
    fixed = sum(amp.bytes_of(run, s, c, "fp16") for c in ("parameters", "gradients", "optimizer", "weight copies"))
    least = fixed + amp.bytes_of(run, s, "activations", "fp32") / 2
    both = "; ".join(f"{s}: {s.fp32 / 1e9:.1f} GB become {s.lowered / 1e9:.1f} GB" for s in steps)
    because = (
        f"{both}. States and 16-bit copies take {fixed / 1e9:.1f} GB whatever the batch: with every activation "
        f"halved {least / 1e9:.1f} GB would be left. All categories added up: with gradients dropped before "
        "forward the peak is lower (D03)."
    )
    return Verdict(word(halved, [not h for h in halved]), because, "modelled")


@verdict("A31")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    found = amp.changes(run)
    limits = [-amp.spread(run, exponent) for _, exponent in found]
    right = [c.low > limit for c, limit in zip(found.values(), limits, strict=True)]
    wrong = [c.high < limit for c, limit in zip(found.values(), limits, strict=True)]
    shown = [key for key, c in found.items() if differs(c, 0.0)]
    (name, exponent), worst = min(found.items(), key=lambda item: item[1].low)
    because = (
        f"At worst {worst} against FP32, seed by seed ({name.upper()}, loss x 2^{exponent}); {len(shown)} of "
        f"{len(found)} show a difference{only_on(run, ONE)}. Between FP32's seeds: {-min(limits):.1f} "
        "points."
    )
    return judged(right, wrong, because)


@verdict("B11")
def _(evidence: Records) -> Verdict:
    """A number that promises is a bound, as elsewhere ("cuts the volume by 90 %"): at least 98 % are kept."""
    run = amp.trained(evidence)
    found = amp.relative_changes(run)
    right, wrong = [c.low > -TWO_PERCENT for c in found.values()], [c.high < -TWO_PERCENT for c in found.values()]
    by_value = sorted(found.items(), key=lambda item: item[1].value)
    ends = ends_of([f"{c} ({name.upper()}, loss x 2^{exponent})" for (name, exponent), c in by_value])
    near = any(within(c, POINT, -TWO_PERCENT) for c in found.values())
    bound = (
        "" if near or not all(right) else " As a bound it holds; a loss of 2 % was not seen, and would be a failure."
    )
    because = (
        f"Relative to FP32's accuracy, seed by seed: {ends}{only_on(run, ONE)}. {sum(right)} of {len(found)} "
        f"are shown to lose less than {TWO_PERCENT:g} %.{bound}"
    )
    return judged(right, wrong, because)


def _added(gains: dict[int, Estimate]) -> str:
    """What a scaler adds, by the factor of the loss, the loss as it is first."""
    said = (
        f"{gain} with {'the loss as it is' if e == 0 else f'a loss x 2^{e}'}"
        for e, gain in sorted(gains.items(), reverse=True)
    )
    return f"accuracy: {', '.join(said)}"


@verdict("A32")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    gains, bf16 = amp.scaling_gains(run), {e: c for (f, e), c in amp.changes(run).items() if f == "bf16"}
    if not bf16:
        raise LookupError("launch('amp_training') with bf16 is needed")
    case = {"order": "scaler, no autocast"}
    without = last(evidence, "loss_scaling", "lowered_share", **case).where("lowered_share", **case)[0].value
    gain = max(gains.values(), key=lambda g: g.low)
    fp16_needs, bf16_needs = gain.low > 0, any(c.high < -amp.spread(run, e) for e, c in bf16.items())
    fp16_free = all(g.high < NO_GAIN for g in gains.values())
    bf16_free = all(c.low > -amp.spread(run, e) for e, c in bf16.items())
    worst = min(bf16.values(), key=lambda c: c.low)
    because = (
        f"A scaler without autocast runs {100 * without:.0f} % of the layers in 16 bits. To FP16 it adds "
        f"{_added(gains)}; BF16 without one is at worst {worst} off FP32."
    )
    if without == 0 and fp16_needs and bf16_needs:
        return Verdict("holds", because)
    if without > 0 or (fp16_free and bf16_free):
        return Verdict("does not hold", because)
    return depends(fp16_needs or bf16_needs, because)


@verdict("E19")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    gains, flushed = amp.scaling_gains(run), [row for row in amp.lost(run) if row[0] > 0]
    trace, order = amp_step.trace(evidence, "planted overflow"), "right, overflow"
    overflowed = amp_step.tried(evidence, order)[order]
    infinite, skipped, scales, expected = (trace[m].samples for m in amp_step.TRACED)
    caught = skipped == infinite and scales == expected and all(t.fine for t in overflowed)
    gain = max(gains.values(), key=lambda g: g.low)
    right = [caught, gain.low > 0, *(scaled < plain / 2 for plain, scaled, _ in flushed)]
    wrong = [not caught, gain.high < NO_GAIN, *(scaled >= plain for plain, scaled, _ in flushed)]
    halved = [f"{a:.0f} to {b:.0f}" for a, b in pairwise(scales) if b < a]
    underflow = [
        f"{model}: {plain:.2g} % of the activations' gradients become 0 without it, {scaled:.2g} % with it. "
        for plain, scaled, model in flushed[:1]
    ]
    then = f"{sum(skipped):.0f} of {len(skipped)} steps and takes the scale from {' and '.join(halved) or 'nowhere'}"
    because = f"{''.join(underflow)}It adds {_added(gains)}; a planted overflow skips {then}."
    return judged(right, wrong, because)


@verdict("B09")
@verdict("E18")
def _(evidence: Records) -> Verdict:
    right = ("right", "right, overflow")
    loops = {
        "no zero_grad": "FP16 with its scaler",
        "no zero_grad, overflow": "after one overflow",
        "no zero_grad, bf16": "BF16",
    }
    found = amp_step.tried(evidence, *right, *loops)
    said = "; ".join(f"{name} {amp_step.said(found[order])}" for order, name in loops.items())
    rest = "" if all(t.fine for o in right for t in found[o]) else " But the right step differs from FP32, too."
    return Verdict(amp_step.harmless(found, *right), f"Without zero_grad: {said}.{rest}")


@verdict("E20")
def _(evidence: Records) -> Verdict:
    run, order = amp.trained(evidence), "clip before unscale_"
    plain = {e: c for (name, e), c in amp.changes(run).items() if name == "fp16"}
    found = amp_step.tried(evidence, "right", order)
    four = [c.low > -amp.spread(run, e) for e, c in plain.items()]  # the four calls, without clipping
    worse = [c.high < -amp.spread(run, e) for e, c in plain.items()]
    clipped = all(t.fine for t in found[order])
    worst = min(plain.values(), key=lambda c: c.low)
    because = (
        f"Without clipping FP16 is at worst {worst} away from FP32. Clipping "
        f"after unscale_ {amp_step.said(found['right'])}, before it {amp_step.said(found[order])}."
    )
    if all(worse) or (all(four) and clipped):
        return Verdict("does not hold" if all(worse) else "holds", because)
    return depends(not clipped or any(worse), because)  # clipping fails, or a factor does


@verdict("D25")
def _(evidence: Records) -> Verdict:
    found = amp_step.tried(evidence, "right", "clip before unscale_")
    said, ended = [], []
    for name in ("planted overflow", "too large a start"):
        with contextlib.suppress(LookupError):
            infinite = amp_step.trace(evidence, name)["found_inf"].samples
            said.append(f"{sum(infinite):.0f} of {len(infinite)} steps ({name})")
            ended.append(not infinite[-1])
    last(evidence, "loss_scaling", "found_inf")
    right = all(t.fine for t in found["right"])
    where = (
        f"not finite in {' and '.join(said)}, and a smaller scale ends it in {sum(ended)} of {len(ended)}"
        if said
        else "all finite"
    )
    because = (
        f"At a learning rate with which FP32 trains, FP16's gradients are {where}. Clipping before unscale_: "
        f"{amp_step.said(found['clip before unscale_'])}."
    )
    wrong_order = not all(t.fine for t in found["clip before unscale_"])
    return Verdict("does not hold" if not right else "depends" if said or wrong_order else "holds", because)


@verdict("E16")
def _(evidence: Records) -> Verdict:
    found = amp.gained(evidence)
    saved = [g.saved for g in found if g.saved is not None]
    right = [g.speed.low > 1 for g in found] + [s > 0 for s in saved]
    wrong = [g.speed.high < 1 for g in found] + [s <= 0 for s in saved]
    said = [
        f"on a {kind} {ends_of([str(g) for g in found if g.device == kind])}"
        for kind in dict.fromkeys(g.device for g in found)
    ]
    with contextlib.suppress(LookupError):
        run = last(evidence, "mixed_precision", "step_s", part="matmul", precision="fp16", casts=True)
        ladder = matmul_ladder.ladder(run, "fp16", casts=True)
        side = matmul_ladder.crossing(ladder)
        said.append(
            f"products with casts win {f'from side {side} on' if side else 'at no side'} "
            f"(tried up to {max(ladder)}, {amp.device(run)})"
        )
    if all(g.device == "CPU" for g in found):  # the article is about GPUs: a CPU alone cannot refute it
        gpu, ratio = published_speed.fp16()
        said += [_on_a_recorded_gpu(run) for run in on_gpus.runs("mixed_precision")]
        said.append(f"published: {ratio:.2f} x on a {gpu}")
        if word(right, wrong) == "does not hold":
            return Verdict("depends", f"FP16 against FP32: {'; '.join(said)}.")
    return judged(right, wrong, f"FP16 against FP32: {'; '.join(said)}.")


def _on_a_recorded_gpu(run: Records) -> str:
    """The speeds of models and of the largest product with casts, over FP32."""
    speeds = (speed for (_, name), speed in amp_report.speed_ups(run).items() if name == "fp16")
    of_models = sorted(speeds, key=lambda e: e.value)
    products = matmul_ladder.ladder(run, "fp16", casts=True)
    side, where = max(products), ", ".join(run.provenance["gpus"])
    return f"recorded on {where}: models {of_models[0]} to {of_models[-1]}, products of side {side} {products[side]}"
