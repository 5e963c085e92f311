"""Verdicts of notebook 06: what its records say of the articles' statements on splitting a model."""

from __future__ import annotations

import math

from labs.chapters.nb06 import claims_fit as fit
from labs.chapters.nb06 import claims_parallel as parallel
from labs.chapters.nb06 import claims_parts as parts
from labs.kit.claims import GAIN, Verdict, depends, ends, judged, size, verdict, word
from labs.kit.measure import Estimate
from labs.kit.record import Records
from labs.parts.sources.published import KERAS_NOT_CONNECTED

LIFTED = 0.75  # of one device's memory on the fuller of two: with less, a model a third larger than one device fits
STATED, ROUNDING = (1.7, 1.9), 0.05  # times; how far a number may be from one with a single decimal
BUSY = 0.1  # of the time: idle for less than a tenth is busy; idle for a tenth less than half is one at a time
SAME = 1e-5  # relative: FP32 gradients that differ by no more were summed in another order
POINT = 1.0  # of accuracy: what training with another loss may cost
TENTH = 0.1  # relative: how far the first losses may be apart


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


@verdict("D04")
def _(evidence: Records) -> Verdict:
    found = parallel.schemes(evidence)
    right = [s.share <= LIFTED and s.speed.low > 1 for s in found]
    wrong = [s.share > LIFTED or s.speed.high < GAIN for s in found]
    open_ = [not r and not w for r, w in zip(right, wrong, strict=True)]
    said = [
        f"{words}: {'; '.join(str(s) for s, so in zip(found, which, strict=True) if so)}"
        for words, which in (("both at once", right), ("not both", wrong), ("cannot be told", open_))
        if any(which)
    ]
    because = f"{parallel.devices(evidence)} against one, {'. '.join([said[0], *map(_sentence, said[1:])])}"
    return judged(right, wrong, because)


@verdict("D06")
def _(evidence: Records) -> Verdict:
    cut = [best for _, best in parallel.split_speeds(evidence).values()]
    found = [*parallel.replicated(evidence), *cut]
    published = parallel.published_speeds()
    speeds = [s.speed for s in found] + [Estimate(v, v, v, 1) for v in published.values()]
    low, high = STATED[0] - ROUNDING, STATED[1] + ROUNDING
    n = len(found)
    right = [low <= s.low and s.high <= high for s in speeds]
    wrong = [s.high < low or s.low > high for s in speeds]
    ideal = [f"{c} ({chain})" for chain, c in parallel.ceilings(evidence).items()]
    two = f". Two copies that never talk reach {', '.join(ideal)}" if ideal else ""
    here = "; ".join(s.timed for s in found)
    values = ends([f"{v:.2f}" for v in sorted(published.values())])
    because = (
        f"of {n} measured {sum(right[:n])} {'is' if sum(right[:n]) == 1 else 'are'} shown to be 1.7 to 1.9 ({low:g} to "
        f"{high:g}, for rounding), {sum(wrong[:n])} shown not to: on {parallel.devices(evidence)} {here}{two}. "
        f"Published, without intervals: {values} with DDP on two V100 ({len(published)} models)"
    )
    return judged(right, wrong, because)


@verdict("D15")
def _(evidence: Records) -> Verdict:
    big, middle = fit.gpt3(), fit.middle()
    holds_gpt3 = big.cards(big.largest_gb) <= 2
    of_use = not middle.fits_one and len(middle.split) > 0
    one = f"one card of {fit.CARD_GB:g} GB is {'' if middle.fits_one else 'not '}enough"
    ways = f"two are enough ({', '.join(middle.ways)})" if middle.fitting else "two are not enough"
    because = (
        f"GPT-3: {big.parameters / 1e9:.1f} x 10^9 parameters take {size(big.weights)} in 16 bits and "
        f"{big.states / 1e12:.2f} TB with gradients and Adam's moments: {big.cards(fit.CARD_GB)} cards of "
        f"{fit.CARD_GB:g} GB, {big.cards(big.largest_gb)} of {big.largest_gb:g} ({big.card}), before any "
        f"activation. A transformer of {middle.parameters / 1e9:g} x 10^9 parameters takes at "
        f"least {size(middle.alone)}: {one}, {ways}"
    )
    return Verdict(word([holds_gpt3, of_use], [not holds_gpt3, not of_use]), because, "modelled")


@verdict("D16")
def _(evidence: Records) -> Verdict:
    by_way = parts.halves(evidence)
    article, right = by_way[parts.ARTICLE], by_way[parts.RIGHT]
    because = (
        f"rebuilt in torch, with an input of its own for the second half, {max(article.first):.0f} of "
        f"{max(right.first):.0f} parameter tensors of the first half get a gradient and it moves by "
        f"{100 * article.moved:.2g} % (accuracy {100 * article.accuracy:.0f} %); a gradient that is sent back "
        f"trains {max(right.first):.0f} and moves it by {100 * right.moved:.0f} % "
        f"({100 * right.accuracy:.0f} %); published: Keras refuses to train such a model, "
        f'"{KERAS_NOT_CONNECTED}"'
    )
    if not right.all_train:  # then the wiring is not what is wrong
        return Verdict("depends", because)
    return Verdict(word([article.all_train], [not any(article.first)]), because)


@verdict("D17")
def _(evidence: Records) -> Verdict:
    found = parts.losses(evidence)
    (wrong, right), (first_wrong, first_right) = found.accuracy, found.first
    same = abs(first_wrong / first_right - 1) <= TENTH
    because = (
        f"the same logits in the first batch: {first_wrong:.2f} nats read as probabilities, {first_right:.2f} "
        f"read as logits (all classes equally likely: {math.log(10):.2f}); trained so, accuracy "
        f"{100 * wrong:.0f} % against {100 * right:.0f} %, seed by seed {found.change}"
    )
    return Verdict(word([same and found.change.low > -POINT], [not same and found.change.high < -POINT]), because)


@verdict("D18")
def _(evidence: Records) -> Verdict:
    found = parallel.idle(evidence)
    right = [i.naive.high < BUSY for i in found]
    wrong = [i.naive.low > 1 / 2 - BUSY for i in found]
    because = f"{'; '.join(map(str, found))}. {parallel.published_split()}"
    return judged(right, wrong, because)


@verdict("D20")
def _(evidence: Records) -> Verdict:
    found = parts.mixed(evidence)
    right = [m.error <= SAME and m.counted for m in found]
    mesh = f"{found[0].copies} copies x {found[0].parts} parts"
    error = max(m.error for m in found)
    equal = "as the closed forms say" if all(m.counted for m in found) else "not what the closed forms say"
    because = (
        f"on {mesh} the gradients of {', '.join(m.name for m in found)} differ from one process's by at most "
        f"{error:.1g}; the bytes along rows and columns are {equal}"
    )
    return Verdict(word(right, [m.error > SAME for m in found]), because)


@verdict("D21")
def _(evidence: Records) -> Verdict:
    found = parts.sums(evidence)
    bytes_sent = {n: {way: parts.busiest(way, n) for way in ("root", "all_reduce", "hand ring")} for n in parts.RANKS}
    fewer = all(by["root"] > by["all_reduce"] for by in bytes_sent.values())
    most, by = max(bytes_sent.items())
    slower, faster = sum(s.slower for s in found), sum(s.faster for s in found)
    counted = "as counted" if parts.counted(evidence) else "other than counted"
    because = (
        f"of {most} ranks a root sends {by['root']:g} lengths of the vector, each rank of all_reduce "
        f"{by['all_reduce']:g}, of a ring by hand {by['hand ring']:g} (closed forms, {counted} on "
        f"{found[0].ranks} ranks). With send and recv the sum is shown to take longer in {slower} and "
        f"shorter in {faster} of {len(found)} comparisons ({found[0].ranks} ranks)"
    )
    largest = max(s.size for s in found)
    no_faster = all(s.time.low > 1 / GAIN for s in found)  # shown, not only not refuted
    if fewer and no_faster and all(s.slower for s in found if s.size == largest):
        return Verdict("holds", because)
    if faster == len(found):
        return Verdict("does not hold", because)
    return depends(bool(faster or slower), because)


@verdict("E12")
def _(evidence: Records) -> Verdict:
    error = parts.errors(evidence)
    first, *others = parts.mixed(evidence)
    shares = [max(m.held) / sum(m.held) for m in (first, *others)]
    kept = {chain: parallel.kept(evidence, chain) for chain in parallel.chains(evidence, "saved_bytes")}
    right = [error <= SAME, *(s <= LIFTED for s in (*shares, *kept.values()))]
    wrong = [error > SAME, *(s > LIFTED for s in (*shares, *kept.values()))]
    speeds = [f"{n.speed} ({chain})" for chain, (n, _) in parallel.split_speeds(evidence).items()]
    held = " and ".join(f"{b / parts.MB:.2f}" for b in first.held)
    because = (
        f"of {sum(first.held) / parts.MB:.2f} MB of parameters the ranks hold {held}, of the activations the "
        f"fuller one has {', '.join(f'{100 * s:.0f} % ({chain})' for chain, s in kept.items())}, and the "
        f"gradients are one process's within {error:.1g}. Without micro-batches the speed is "
        f"{', '.join(speeds)} that of one device"
    )
    return Verdict(word(right, wrong), because)


@verdict("E27")
def _(evidence: Records) -> Verdict:
    found, says = fit.shown(fit.LISTINGS), fit.replicates()
    where = f"one device ({', '.join(found.devices)})" if not found.splits else ", ".join(found.devices)
    copies = f", wraps it in DataParallel (lines {', '.join(found.replicas)})" if found.replicas else ""
    quoted = f': "{says}"' if copies and says else ""
    casts = f"autocast in lines {', '.join(found.casts)}" if found.casts else "no autocast"
    because = f"its code places a model on {where}{copies}{quoted}; {casts}"
    shown = [bool(found.splits), bool(found.casts)]
    return Verdict(word(shown, [not s for s in shown]), because, "")
