"""The arithmetic: times of a whole job from its ranks' profiles, and estimated gains with their intervals.

A job's step is as long as that of its slowest rank, in each round and in each step anew.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from labs.doctor.profile import AS_IS, KINDS, Profile, rare_kinds
from labs.kit.measure import Estimate, estimate, fewest

WORTH = 1.05  # Smaller gains aren't reported
WORTH_INSTEAD = 1.20  # A gain by arithmetic that stands in for one that noise has made useless
WORTH_BY_PARTS = 1.10
"""By arithmetic a part is worth more than in truth: what waits for it may then wait for something else."""
FINE = 1.10
"""An interval that holds 1 and ends below this shows that there is little to gain; a wider one shows nothing."""
SAME_WEIGHTS = 1e-9  # Sums of the same weights, in FP64, differ by less than this share
NO_EXCHANGE = "no exchange"
RESAMPLES = 2_000
BLOCKS = fewest() + 1  # Of a series that may grow: as many differences between neighbours as an interval needs


def steps_s(ranks: Sequence[Profile]) -> list[float]:
    """Each step as it is, of the whole job."""
    return [max(steps) for steps in zip(*(f.step_s for f in ranks), strict=False)]


def even_s(ranks: Sequence[Profile]) -> list[float]:
    """Steps with what only some have (a validation, a save) spread over all of them."""
    each = []
    for f in ranks:
        lost = lost_s(f, *rare_kinds(f)) or [0.0] * len(f.step_s)
        each.append([s - part + statistics.fmean(lost) for s, part in zip(f.step_s, lost, strict=True)])
    return [max(steps) for steps in zip(*each, strict=False)]


def samples_per_s(ranks: Sequence[Profile]) -> Estimate | None:
    """Of all ranks together; None if no rank could count its samples."""
    if any(not f.samples for f in ranks) or not steps_s(ranks):
        return None
    samples = sum(f.samples for f in ranks)
    return estimate([samples / s for s in even_s(ranks)], "samples/s", resamples=RESAMPLES)


def part_s(profile: Profile, *kinds: str) -> float:
    """Mean per step; parts that are not in every step count as what they cost on average."""
    return sum(statistics.fmean(profile.spans_s[k]) for k in kinds if profile.spans_s.get(k))


def rounds_s(ranks: Sequence[Profile], mode: str) -> list[list[float] | None]:
    """By round: the mean step of each rank in its turn of a mode; None where one of them has had none."""
    turns = [f.interleaved_s.get(mode, []) for f in ranks]
    whole = [max(map(len, of), default=0) for of in turns]  # the last turn of a run that was ended may lack steps
    return [
        [statistics.fmean(turn) for turn in turns_of] if all(map(_is_whole, turns_of, whole)) else None
        for turns_of in zip(*turns, strict=False)
    ]


def _is_whole(turn: Sequence[float], steps: int) -> bool:
    return bool(turn) and len(turn) == steps


def pairs_s(ranks: Sequence[Profile], mode: str) -> list[tuple[float, float]]:
    """The job's step as it is and in a mode, in each round that has both."""
    both = zip(rounds_s(ranks, AS_IS), rounds_s(ranks, mode), strict=False)
    return [(max(a), max(b)) for a, b in both if a and b]


def interleaved(ranks: Sequence[Profile], mode: str, more_s: float = 0.0) -> Estimate | None:
    """How many times as fast, per sample: median over rounds of as it is / mode. None if it wasn't tried.

    `more_s`: what a step with the fix takes besides.
    """
    ratios = ratios_of(ranks, mode, more_s)
    return of_ratios(ratios, looks(ranks)) if ratios else None


def ratios_of(ranks: Sequence[Profile], mode: str, more_s: float = 0.0) -> list[float]:
    """As it is / mode, per sample, in each round.

    A larger batch is one that was loaded already, given twice: a real one waits for its data as often as it is larger.
    """
    factor = ranks[0].samples_factor.get(mode, 1.0)
    more_s += (factor - 1) * max(part_s(f, "data") for f in ranks) if factor > 1 else 0.0
    return [factor * a / (b + more_s) for a, b in pairs_s(ranks, mode) if b > 0]


def looks(ranks: Sequence[Profile]) -> int:
    """How many intervals are looked at: of each counterfactual, and of which rank is late."""
    return max(len(ranks[0].interleaved_s) - 1, 0) + len(ranks)


def of_ratios(ratios: Sequence[float], looks: int) -> Estimate:
    """Median, with an interval that holds together with those of all other `looks` in 95 % of runs.

    Of twenty plain intervals one misses, and a healthy script would be accused every other time. So this one is that
    of the sign test at 1 - 0.05 / looks (Bonferroni), which no outlier widens; with too few rounds for that, Student's
    t of the logarithms at the same level; and never narrower than the plain one.
    """
    plain = estimate(ratios, "x", resamples=RESAMPLES)
    if len(ratios) < 2:
        return plain
    if k := _ranks_left_out(len(ratios), 0.05 / looks):
        low, *_, high = sorted(ratios)[k - 1 : len(ratios) - k + 1]
        return Estimate(plain.value, min(plain.low, low), max(plain.high, high), plain.n, "x")
    from scipy.special import stdtrit  # imported late: it takes half a second

    logs = [math.log(r) for r in ratios]
    half = float(stdtrit(len(logs) - 1, 1 - 0.025 / looks)) * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.fmean(logs)
    low, high = min(plain.low, math.exp(mean - half)), max(plain.high, math.exp(min(mean + half, 50.0)))
    return Estimate(plain.value, low, high, plain.n, "x")


def _ranks_left_out(n: int, miss: float) -> int:
    """Greatest k so that the k-th smallest and k-th largest of n enclose the median but for `miss`; 0 if there is none.

    The median is below the k-th smallest with the chance that fewer than k of n throws of a coin are heads.
    """
    tails, k = 0, 0
    while k < n // 2:
        tails += math.comb(n, k)
        if 2 * tails > miss * 2**n:
            break
        k += 1
    return k


def without(steps: Sequence[float], parts: Sequence[float]) -> Estimate | None:
    """step / (step - part), at most so many times as fast by arithmetic: sums over steps, with a bootstrap interval.

    Steps are drawn with their parts, so that a part that few steps have gets the wide interval that it deserves. None
    if there is no step.
    """
    pairs = [(s, s - min(max(p, 0.0), 0.99 * s)) for s, p in zip(steps, parts, strict=False) if s > 0]
    if not pairs:
        return None
    import numpy as np

    both = np.array(pairs)  # (steps, 2): as it is, without
    drawn = both[np.random.default_rng(0).integers(len(both), size=(RESAMPLES, len(both)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    value = float(both[:, 0].sum() / both[:, 1].sum())
    return Estimate(value, min(float(low), value), max(float(high), value), len(pairs), "x")


def from_parts(ranks: Sequence[Profile], *kinds: str) -> tuple[Estimate | None, Profile]:
    """Gain without these parts, by arithmetic, and of which rank: the one that has most of them.

    None on a device that works beside the host: what the host does meanwhile costs nothing. Of rare parts it is there,
    too: by how much the steps that have them are longer than the others.
    """
    most = max(ranks, key=lambda f: part_s(f, *kinds))
    hidden = most.device != "cpu" and not _are_rare(most, kinds)
    return (None if hidden else without(steps_s(ranks), lost_s(most, *kinds))), most


def lost_s(profile: Profile, *kinds: str) -> list[float]:
    """What parts take of each step; rare ones, on a device beside the host, with the device's share in them."""
    parts = [profile.spans_s.get(k, [0.0] * len(profile.step_s)) for k in kinds]
    lost = [sum(of) for of in zip(*parts, strict=False)]
    if kinds == ("data",) and lost and profile.restarts:  # what starting workers takes has a finding of its own
        usual = statistics.median([s for i, s in enumerate(lost) if i not in profile.restarts] or [0.0])
        lost = [usual if i in profile.restarts else s for i, s in enumerate(lost)]
    if profile.device == "cpu" or not _are_rare(profile, kinds):
        return lost
    return longer_s(profile.step_s, [i for i, s in enumerate(lost) if s])


def _are_rare(profile: Profile, kinds: Sequence[str]) -> bool:
    """Whether only some steps have them: by how much these are longer prices them on any device."""
    return set(kinds) <= set(rare_kinds(profile))


def longer_s(steps: Sequence[float], at: Sequence[int]) -> list[float]:
    """Of each step: by how much it is longer than the median of those that are not `at`; 0 for these."""
    usual = statistics.median([s for i, s in enumerate(steps) if i not in at] or steps)
    return [max(0.0, s - usual) if i in at else 0.0 for i, s in enumerate(steps)]


def split(ranks: Sequence[Profile]) -> bool:
    """Whether ranks train different weights: a pipeline's stages, shards of tensors, or models of their own.

    They then do different work by design, and wait for each other by design.
    """
    of = [f.training for f in ranks]
    if len({row.get("shapes") for row in of}) > 1:
        return True
    if any(row.get("ddp") or row.get("fsdp") for row in of):  # which hold the same weights, or even shards of them
        return False
    sums = [row.get("weights", 0.0) for row in of]
    return max(sums) - min(sums) > SAME_WEIGHTS * max(map(abs, sums))


def enough(gain: Estimate | None) -> bool:
    """Whether its interval rests on as many samples as one needs."""
    return gain is not None and gain.n >= fewest()


def standing(gain: Estimate, worth: float = WORTH) -> str:
    """ "gain", "fine" (too little to gain) or "unclear" (this run cannot tell)."""
    if enough(gain) and gain.low > 1 and gain.value >= worth:
        return "gain"
    return "fine" if enough(gain) and gain.high < FINE else "unclear"


def growth(series: Sequence[float], unit: str, at: Sequence[float] = ()) -> Estimate | None:
    """By how much a series grows per step, from medians of blocks of it. None if it is too short to tell.

    `at`: the steps at which it was taken, if not at each.
    What grows by itself goes on in each block; what settles, or jumps once, does not: then the interval holds 0.
    """
    size = len(series) // BLOCKS
    if not size:
        return None
    both = [values[len(series) - size * BLOCKS :] for values in (series, at or range(len(series)))]
    medians, steps = ([statistics.median(of[i : i + size]) for i in range(0, len(of), size)] for of in both)
    grown = [b - a for a, b in itertools.pairwise(medians)]
    return estimate(
        [g / (b - a) for g, (a, b) in zip(grown, itertools.pairwise(steps), strict=True)], unit, resamples=RESAMPLES
    )


@dataclass(frozen=True)
class Own:
    """What each rank needs for a step of its own, without waiting for others."""

    ranks: list[list[float]]  # One list for each rank, of rounds or of steps:
    job: list[float]  # the job's step as it is, in each of them
    interleaved: bool  # Measured without exchange; otherwise the sum of parts in which nobody waits


def own_interleaved(ranks: Sequence[Profile]) -> Own | None:
    """None for one rank, and where nothing could be taken without exchange."""
    both = zip(rounds_s(ranks, AS_IS), rounds_s(ranks, NO_EXCHANGE), strict=False)
    rounds = [(max(a), b) for a, b in both if a and b]
    if len(ranks) < 2 or not rounds:
        return None
    return Own([[b[rank] for _, b in rounds] for rank in range(len(ranks))], [a for a, _ in rounds], True)


def own_from_parts(ranks: Sequence[Profile]) -> Own | None:
    """None for one rank, and on devices whose work the host's clock does not see."""
    if len(ranks) < 2 or ranks[0].device != "cpu":
        return None
    alone = [k for k in KINDS if k not in ("backward", "exchange", "synchronise")]
    job = steps_s(ranks)
    own_s = [[sum(f.spans_s[k][i] for k in alone if k in f.spans_s) for i in range(len(job))] for f in ranks]
    return Own(own_s, job, False)
