"""Verdicts of notebook 05: what its records say of the articles' statements on memory and checkpointing."""

from __future__ import annotations

import contextlib
import math

from labs.chapters.nb05 import claims_memory as memory
from labs.chapters.nb05 import claims_recompute as recompute
from labs.chapters.nb05 import claims_remedies as remedies
from labs.kit.claims import GB, Verdict, judged, last, only_on, size, verdict, within, word
from labs.kit.record import Records
from labs.memory_remedies.ways_out import HALF

GB_7, GB_11, GB_12, GB_24 = 7e9, 11e9, 12e9, 24e9
USUAL = (1, 256)  # rows of a step: 256 is the batch of ResNet (arXiv 1512.03385) and of BERT (arXiv 1810.04805)
TRACE = 0.05  # relative: how far a trace may be from what tensors really take
NEXT_CARD = 1.5  # from 16 to 24, 40 and 80 GB each card has at least as much more: beyond it one buys the wrong card
ABOUT_20, OFF = 20.0, 5.0  # %, and how far from it is still that
LINEAR = 1.25  # memory that grows as a higher power of the length is on its way to the square
SAME = 1e-4  # relative: gradients that differ by no more are the same but for rounding


# -- a step's memory, traced


@verdict("A27")
def _(evidence: Records) -> Verdict:
    run = last(evidence, memory.LAB, "measured_bytes")
    found = memory.checked(run)
    # a GPU's peak holds the workspace of its kernels: only a trace above it is surely wrong
    off = [max(c.error, 0.0) if c.together else abs(c.error) for c in found]
    right = [error <= TRACE and c.beyond <= NEXT_CARD for error, c in zip(off, found, strict=True)]
    off_by, worst = max(zip(off, found, strict=True), key=lambda pair: pair[0])
    most = max(found, key=lambda c: c.beyond)
    seconds, resident, peak = memory.effort(run)
    took = f" and all of them {size(resident)} of memory" if math.isfinite(resident) else ""
    how = "too high" if any(c.together for c in found) else "off"
    less = f" above {size(memory.WORKSPACE)}" if any(c.together for c in found) else ""
    because = (
        f"traces say what tensors take in {len(found)} real steps, {how} by at most "
        f"{100 * off_by:.2g} % ({worst.name}); all that the allocator gave, workspace of kernels too{less}, "
        f"was up to {most.beyond:.2f} x as much ({most.name}); a trace took at most {seconds:.1f} s{took}, for "
        f"steps of up to {size(peak)}"
    )
    return Verdict(word(right, [not r for r in right]), because)


@verdict("B15")
def _(evidence: Records) -> Verdict:
    cuts = memory.cuts(memory.traced(evidence, "resnet152"))
    claimed = [c for row in cuts.values() if memory.near(row[0].whole.peak, GB_11) for c in row]
    if not claimed:
        raise LookupError("launch('memory_oracle') with a batch of ResNet-152 that takes about 11 GB is needed")
    right = [memory.near(c.cut.peak, GB_7) for c in claimed]
    batch, row = min(cuts.items(), key=lambda item: abs(item[1][0].whole.peak - GB_11))
    because = (
        f"batch {batch}: {size(row[0].whole.peak)} become {' or '.join(map(str, row))}; {sum(right)} of "
        f"the {len(right)} that start near 11 GB end near 7 "
        f"({claimed[0].whole.settings}, traced)"
    )
    return Verdict(word(right, [not r for r in right]), because, "modelled")


@verdict("D02")
def _(evidence: Records) -> Verdict:
    steps = memory.plain(memory.traced(evidence, "resnet152"))[0]
    step = steps[-1]
    few, many = (step.line(rows) for rows in USUAL)
    right = [memory.near(b, GB_11) for b in (few, many)]
    never = few > GB_11 + GB / 2 or many < GB_11 - GB / 2
    at = "no usual batch" if never else "any usual batch" if all(right) else f"batch {step.rows_in(GB_11):.0f}"
    said = ", ".join(f"{size(s.peak)} with batch {s.batch}" for s in steps)
    because = (
        f"{said}: an image adds {step.per_row / GB:.3f} GB, so that it is 11 GB at {at} and {size(many)} at "
        f"{USUAL[1]} ({step.settings}, traced)"
    )
    return Verdict(word(right, [never, never]), because, "modelled")


@verdict("D03")
def _(evidence: Records) -> Verdict:
    groups = [group[-1] for group in memory.plain(memory.traced(evidence, "bert_large"))]
    right, wrong = [s.line(USUAL[0]) > GB_24 for s in groups], [s.line(USUAL[1]) <= GB_24 for s in groups]
    said = [
        f"{s.case['seq']} tokens{'' if s.case['set_to_none'] else ' (gradients kept in forward)'}: {size(s.peak)} "
        f"with batch {s.batch}, {s.fitting(GB_12)}, {s.fitting(GB_24)}"
        for s in groups
    ]
    because = f"{'; '.join(said)} ({groups[0].settings}, traced)"
    return Verdict(word(right, wrong), because, "modelled")


@verdict("C28")
def _(evidence: Records) -> Verdict:
    found, real = memory.limits(evidence), ""
    with contextlib.suppress(LookupError):
        real = f"; {remedies.halved(evidence)}"
    right = [limit.exceeded for limit in found]
    because = f"{found[0]} (traced){real}"
    return Verdict(word(right, [not r for r in right]), because, "modelled")


# -- activation checkpointing


@verdict("B12")
def _(evidence: Records) -> Verdict:
    found = recompute.prices(evidence)
    right = [within(p.time, OFF, ABOUT_20) for p in found]
    wrong = [p.time.low > ABOUT_20 + OFF or p.time.high < ABOUT_20 - OFF for p in found]
    devices = " and a ".join(sorted({p.device for p in found}))
    because = (
        f"a step takes longer by {' to '.join(dict.fromkeys((str(found[0]), str(found[-1]))))} on a {devices}; "
        f"of {len(found)} policies {sum(right)} are shown to cost {ABOUT_20 - OFF:g} to {ABOUT_20 + OFF:g} %, "
        f"{sum(wrong)} are shown not to{only_on(r for r in evidence if r.lab == recompute.LAB)}"
    )
    return judged(right, wrong, because)


@verdict("B13")
def _(evidence: Records) -> Verdict:
    found = recompute.called(evidence)
    trains, repaired = [c.trains for c in found], sum(c.repaired for c in found)
    which = ", ".join(c.scenario for c in found if c.trains) or "none"
    because = (
        f"without use_reentrant {sum(trains)} of {len(found)} uses train ({which}) and "
        f"{recompute.announces(found)}; with use_reentrant=False {repaired} train, no warning"
    )
    if found[0].torch and not all(trains):
        because += f"; this was torch {found[0].torch}"
    return Verdict(word(trains, [not t for t in trains]), because)


@verdict("B14")
def _(evidence: Records) -> Verdict:
    found = recompute.kept(evidence)
    cut = [k for k in found if not k.selective]
    caches, drops = all(k.saved_bytes > 0 for k in cut), all(k.saved_bytes < k.none_bytes for k in cut)
    because = (
        f"forward leaves {size(cut[0].none_bytes)} behind without it, and with it "
        f"{' to '.join(dict.fromkeys(map(str, (cut[0], cut[-1]))))}: "
        + (
            "inputs of segments are cached, what is inside is dropped"
            if caches and drops
            else "nothing is cached"
            if drops
            else "no less than without"
        )
    )
    return Verdict("depends" if caches and drops else word([caches], [drops]), because)


@verdict("B16")
def _(evidence: Records) -> Verdict:
    found = recompute.longest(evidence)
    saves = [x.falls >= remedies.HELPS for x in found]
    right = [s and x.order <= LINEAR for s, x in zip(saves, found, strict=True)]
    because = (
        f"a checkpoint per block takes the activations of {found[0].seq} tokens in BERT-large "
        f"{'; '.join(map(str, found))} (traced){recompute.sdpa_alone(found)}"
    )
    return Verdict(word(right, [not s for s in saves]), because, "modelled")


# -- remedies


@verdict("B41")
def _(evidence: Records) -> Verdict:
    return Verdict(*remedies.advice(evidence, HALF, remedies.AUTOCAST))


@verdict("D24")
def _(evidence: Records) -> Verdict:
    found, said = remedies.advice(evidence, HALF, remedies.MICRO)
    error, time = remedies.accumulated(evidence)
    same = error <= SAME
    because = (
        f"{said}. Gradients of 4 micro-batches are {'equal but for rounding' if same else 'not equal'}; they "
        f"take {time} the time"
    )
    return Verdict("depends" if found == "holds" and not same else found, because)
