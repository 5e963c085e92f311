"""Verdicts of notebook 04: what its records say of the articles' statements on mixed precision."""

from __future__ import annotations

import contextlib
from itertools import pairwise

from labs.chapters.nb04 import claims_amp as amp
from labs.chapters.nb04 import claims_amp_step as amp_step
from labs.kit.claims import Verdict, last, verdict, within, word
from labs.kit.claims import ends as ends_of
from labs.kit.measure import differs
from labs.kit.record import Records
from labs.parts.precision import matmul_ladder

ABOUT_20 = (15.0, 25.0)  # %
ABOUT_50 = (45.0, 50.0)  # %, what "up to 50 %" must come to somewhere
GB_24, GB_12 = 24e9, 12e9
NEAR = 0.1  # relative: which memory counts as these
NO_GAIN = 1.0  # points of accuracy up to which scaling brings nothing
TWO_PERCENT, POINT = 2.0, 0.5  # %: what is lost if 98 % are kept, and how near to that is that


@verdict("A30")
def _(evidence: Records) -> Verdict:
    run = amp.memory(evidence)
    steps = amp.steps(run)
    near = [ABOUT_20[0] <= s.saved <= ABOUT_20[1] for s in steps]
    said = ends_of([f"{s.saved:.0f} % ({s})" for s in steps])
    because = (f"autocast saves {said} of a training step's memory{amp.peaks(run)}; {sum(near)} of {len(near)} cases "
               f"are between {ABOUT_20[0]:g} and {ABOUT_20[1]:g} % ({amp.checked(run)})")  # fmt: skip
    return Verdict(word(near, [not n for n in near]), because, "modelled")


@verdict("B07")
def _(evidence: Records) -> Verdict:
    run = amp.memory(evidence)
    bounds, best = amp.most_of_activations(run), {s.model: s for s in amp.steps(run)}
    said = "; ".join(f"{amp.NAMES[m]}: {b:.0f} % of the activations, at most {best[m].saved:.0f} % of everything "
                     f"(batch {best[m].batch})" for m, b in bounds.items())  # fmt: skip
    near = [ABOUT_50[0] <= b <= ABOUT_50[1] for b in bounds.values()]
    because = (f"autocast saves, {said}; parameters, gradients and optimizer state do not shrink"
               f"{amp.buckets(evidence)} ({amp.checked(run)})")  # fmt: skip
    return Verdict(word(near, [not n for n in near]), because, "modelled")


@verdict("B10")
def _(evidence: Records) -> Verdict:
    run = amp.memory(evidence, "bert_large")
    steps = [s for s in amp.steps(run) if s.model == "bert_large" and abs(s.fp32 / GB_24 - 1) <= NEAR]
    if not steps:
        raise LookupError("launch('amp_memory') with a batch of BERT-large that takes about 24 GB is needed")
    halved = [s.lowered <= (1 + NEAR) * GB_12 for s in steps]
    s = min(steps, key=lambda s: abs(s.fp32 - GB_24))
    fixed = sum(amp.bytes_of(run, s, c, "fp16") for c in ("parameters", "gradients", "optimizer", "weight copies"))
    least = fixed + amp.bytes_of(run, s, "activations", "fp32") / 2
    config = run[0].config
    settings = [f"{k} {config[k]}" for k in ("optimizer", "attention") if k in config]
    both = "; ".join(f"batch {s.batch} of {s.seq} tokens: {s.fp32 / 1e9:.1f} GB become {s.lowered / 1e9:.1f} GB"
                     for s in steps)  # fmt: skip
    because = (f"{both}; states and 16-bit copies of the weights take {fixed / 1e9:.1f} GB whatever the batch: if "
               f"every activation were halved, {least / 1e9:.1f} GB would be left "
               f"({', '.join([*settings, amp.checked(run)])})")  # fmt: skip
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
    because = (f"accuracy against FP32, seed by seed: at worst {worst} ({name.upper()}, loss x 2^{exponent}); "
               f"{len(shown)} of {len(found)} comparisons show a difference; FP32 alone differs by "
               f"{-min(limits):.1f} points from seed to seed")  # fmt: skip
    return Verdict(word(right, wrong), because)


@verdict("B11")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    found = amp.relative_changes(run)
    right = [within(c, POINT, -TWO_PERCENT) for c in found.values()]
    wrong = [differs(c, -TWO_PERCENT) and not r for c, r in zip(found.values(), right, strict=True)]
    by_value = sorted(found.items(), key=lambda item: item[1].value)
    ends = ends_of([f"{c} ({name.upper()}, loss x 2^{exponent})" for (name, exponent), c in by_value])
    less = sum(c.low > -TWO_PERCENT for c in found.values())
    because = (f"accuracy changes, relative to that of FP32 and seed by seed, by {ends}; {less} of {len(found)} "
               f"formats and factors are shown to lose less than {TWO_PERCENT:g} %")  # fmt: skip
    return Verdict(word(right, wrong), because)


@verdict("A32")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    gains, bf16 = amp.scaling_gains(run), {e: c for (f, e), c in amp.changes(run).items() if f == "bf16"}
    if not bf16:
        raise LookupError("launch('amp_training') with bf16 is needed")
    case = {"order": "scaler, no autocast"}
    without = last(evidence, "loss_scaling", "lowered_share", **case).where("lowered_share", **case)[0].value
    exponent, gain = max(gains.items(), key=lambda item: item[1].low)
    fp16_needs, bf16_needs = gain.low > 0, any(c.high < -amp.spread(run, e) for e, c in bf16.items())
    fp16_free = all(g.high < NO_GAIN for g in gains.values())
    worst = min(bf16.values(), key=lambda c: c.low)
    because = (f"a scaler without autocast runs {100 * without:.0f} % of the layers in 16 bits; GradScaler adds {gain} "
               f"of accuracy to FP16 (loss x 2^{exponent}; {gains[max(gains)]} at 2^{max(gains)}); BF16, which has "
               f"none, is at worst {worst} away from FP32")  # fmt: skip
    if without == 0 and fp16_needs and bf16_needs:
        return Verdict("holds", because)
    return Verdict("does not hold" if without > 0 or (fp16_free and not bf16_needs) else "depends", because)


@verdict("E19")
def _(evidence: Records) -> Verdict:
    run = amp.trained(evidence)
    gains, flushed = amp.scaling_gains(run), [row for row in amp.lost(run) if row[0] > 0]
    trace, order = amp_step.trace(evidence, "planted overflow"), "right, overflow"
    overflowed = amp_step.tried(evidence, order)[order]
    infinite, skipped, scales, expected = (trace[m].samples for m in amp_step.TRACED)
    caught = skipped == infinite and scales == expected and all(t.fine for t in overflowed)
    exponent, gain = max(gains.items(), key=lambda item: item[1].low)
    right = [caught, gain.low > 0, *(scaled < plain / 2 for plain, scaled, _ in flushed)]
    wrong = [not caught, gain.high < NO_GAIN, *(scaled >= plain for plain, scaled, _ in flushed)]
    halved = [f"{a:.0f} to {b:.0f}" for a, b in pairwise(scales) if b < a]
    underflow = [f"{model}: {plain:.2g} % of the activations' gradients become 0 without, {scaled:.2g} % with it"
                 for plain, scaled, model in flushed[:1]]  # fmt: skip
    because = "; ".join([*underflow, f"it adds {gain} of accuracy (loss x 2^{exponent})",
                         f"a planted overflow skips {sum(skipped):.0f} of {len(skipped)} steps and takes the scale "
                         f"from {' and '.join(halved) or 'nowhere'}; training through it: "
                         f"{amp_step.said(overflowed)}"])  # fmt: skip
    return Verdict(word(right, wrong), because)


@verdict("B08")
@verdict("E17")
def _(evidence: Records) -> Verdict:
    old, new, kind = amp_step.interfaces(evidence)
    outdated = [any(w in c["categories"] for w in ("FutureWarning", "DeprecationWarning")) for c in old]
    right = [c["works"] and not o for c, o in zip(old, outdated, strict=True)]
    told = [f": {c['words'].split('; ')[0].rstrip('.')}" for c in old if c["words"]][:1]
    fine = [c["interface"] for c in new if c["works"] and not c["categories"]]
    because = (f"{sum(outdated)} of {len(old)} calls of torch.cuda.amp are announced as deprecated"
               f"{''.join(told)}; {sum(c['works'] for c in old)} do anything on the {kind} here; without a warning: "
               f"{', '.join(fine) or 'none of torch.amp'}")  # fmt: skip
    return Verdict(word(right, outdated), because)


@verdict("B09")
@verdict("E18")
def _(evidence: Records) -> Verdict:
    right = ("right", "right, overflow")
    loops = {"no zero_grad": "FP16 with its scaler", "no zero_grad, overflow": "after one overflow",
             "no zero_grad, bf16": "BF16"}  # fmt: skip
    found = amp_step.tried(evidence, *right, *loops)
    said = [f"{name}: {amp_step.said(found[order])}" for order, name in loops.items()]
    with contextlib.suppress(LookupError):
        case = {"order": "no zero_grad, bf16"}
        norms = last(evidence, "loss_scaling", "same_batch_norm_ratio", **case).one("same_batch_norm_ratio", **case)
        said[-1] += f", gradients of the same batch grow {', '.join(f'{n:.3g}' for n in norms.samples)} x"
    rest = "" if all(t.fine for o in right for t in found[o]) else "; but the right step differs from FP32, too"
    return Verdict(amp_step.harmless(found, *right), f"without zero_grad, {'; '.join(said)}{rest}")


@verdict("E20")
def _(evidence: Records) -> Verdict:
    order = "clip before unscale_"
    found = amp_step.tried(evidence, "right", order)
    wrong, right = found[order][0], found["right"][0]
    seen = (f"it sees a norm of {wrong.norm:.3g} where that of the gradient is {right.norm:.3g}, and " if wrong.norm
            and right.norm else "")  # fmt: skip
    because = (f"clipping before unscale_: {amp_step.said(found[order])}; {seen}parameters move {wrong.moved:.2g} x as "
               f"far as in FP32 ({wrong.optimizer}); after unscale_: {amp_step.said(found['right'])}")  # fmt: skip
    return Verdict(amp_step.harmless(found, "right"), because)


@verdict("D25")
def _(evidence: Records) -> Verdict:
    found = amp_step.tried(evidence, "right", "clip before unscale_")
    said, ended = [], []
    for name in ("planted overflow", "too large a start"):
        with contextlib.suppress(LookupError):
            trace = amp_step.trace(evidence, name)
            infinite = trace["found_inf"].samples
            said.append(f"{sum(infinite):.0f} of {len(infinite)} ({name})")
            ended.append(not infinite[-1])
    last(evidence, "loss_scaling", "found_inf")
    right = all(t.fine for t in found["right"])
    other = (f"at a learning rate with which FP32 trains, gradients are not finite in {' and '.join(said)} steps, and "
             f"GradScaler's smaller scale ends it in {sum(ended)} of {len(ended)}" if said else
             "at a learning rate with which FP32 trains all gradients are finite")  # fmt: skip
    because = (f"{other}; clipping after unscale_ trains {amp_step.said(found['right'])}, before it: "
               f"{amp_step.said(found['clip before unscale_'])}")  # fmt: skip
    wrong_order = not all(t.fine for t in found["clip before unscale_"])
    return Verdict("does not hold" if not right else "depends" if said or wrong_order else "holds", because)


@verdict("E16")
def _(evidence: Records) -> Verdict:
    found = amp.gained(evidence)
    saved = [g.saved for g in found if g.saved is not None]
    right = [g.speed.low > 1 for g in found] + [s > 0 for s in saved]
    wrong = [g.speed.high < 1 for g in found] + [s <= 0 for s in saved]
    said = [f"on a {kind} {'; '.join(str(g) for g in found if g.device == kind)}"
            for kind in dict.fromkeys(g.device for g in found)]  # fmt: skip
    with contextlib.suppress(LookupError):
        run = last(evidence, "mixed_precision", "step_s", part="matmul", precision="fp16", casts=True)
        ladder = matmul_ladder.ladder(run, "fp16", casts=True)
        side = matmul_ladder.crossing(ladder)
        said.append(f"matrix products with their casts win {f'from side {side} on' if side else 'at no side'} "
                    f"(tried up to {max(ladder)}, {amp.device(run)})")  # fmt: skip
    if all(g.device == "CPU" for g in found):
        said.append("no GPU, whose matrix units FP16 is made for, was measured")
    return Verdict(word(right, wrong), f"FP16 against FP32: {'; '.join(said)}")
