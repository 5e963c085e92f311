"""Verdicts of notebook 06: what its records say of the articles' statements on splitting a model."""

from __future__ import annotations

import math

from labs.chapters.nb06 import claims_parallel as parallel
from labs.chapters.nb06 import claims_parts as parts
from labs.common.sources.published import KERAS_NOT_CONNECTED
from labs.kit.claims import GAIN, Verdict, ends, judged, verdict, word
from labs.kit.measure import Estimate
from labs.kit.record import Records

LIFTED = 0.75  # of one device's memory on the fuller of two: with less, a model a third larger than one device fits
STATED, ROUNDING = (1.7, 1.9), 0.05  # times; how far a number may be from one with a single decimal
BUSY = 0.1  # of the time: idle for less than a tenth is busy; idle for a tenth less than half is one at a time
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
