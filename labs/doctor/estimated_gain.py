"""The arithmetic: times of a whole job from its ranks' profiles, and estimated gains with their intervals.

A job's step is as long as that of its slowest rank, in each round and in each step anew.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from labs.doctor.profile import AS_IS, Profile, rare_kinds
from labs.kit.measure import Estimate, estimate, fewest

WORTH = 1.05  # Smaller gains aren't reported
WORTH_BY_PARTS = 1.10  # What waits for a part may without it wait for something else
FINE = 1.10  # An interval that ends below this shows that there is little to gain; a wider one shows nothing
SAME_WEIGHTS = 1e-9  # Sums of the same weights, in FP64, differ by less than this share
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


def turns_s(ranks: Sequence[Profile], mode: str) -> list[tuple[list[float], list[float]]]:
    """Each rank's mean step as it is and in a mode, in each round in which all ranks had both turns."""
    sides = (zip(*(f.interleaved_s.get(name, []) for f in ranks), strict=False) for name in (AS_IS, mode))
    return [tuple([statistics.fmean(turn) for turn in side] for side in both) for both in zip(*sides, strict=False)]


def pairs_s(ranks: Sequence[Profile], mode: str) -> list[tuple[float, float]]:
    """The job's step as it is and in a mode, in each round that has both."""
    return [(max(a), max(b)) for a, b in turns_s(ranks, mode)]


def interleaved(ranks: Sequence[Profile], mode: str, more_s: float = 0.0) -> Estimate | None:
    """How many times as fast: median over rounds of as it is / mode. None if it wasn't tried.

    `more_s`: what a step with the fix takes besides.
    """
    ratios = [a / (b + more_s) for a, b in pairs_s(ranks, mode) if b > 0]
    return of_ratios(ratios, looks(ranks)) if ratios else None


def looks(ranks: Sequence[Profile]) -> int:
    """How many intervals are looked at: of each counterfactual, and of which rank is late."""
    return max(len(ranks[0].interleaved_s) - 1, 0) + len(ranks)


def of_ratios(ratios: Sequence[float], looks: int) -> Estimate:
    """Median, with an interval that holds together with those of all other `looks` in 95 % of runs (Bonferroni).

    It is the sign test's, which no outlier widens; with too few rounds for that, Student's t of the logarithms.
    """
    plain = estimate(ratios, "x", resamples=RESAMPLES)
    if len(ratios) < 2:
        return plain
    from scipy.special import bdtr, stdtrit  # imported late: it takes half a second

    left_out = sum(bdtr(k, len(ratios), 0.5) <= 0.025 / looks for k in range(len(ratios) // 2))
    if left_out:
        low, *_, high = sorted(ratios)[left_out - 1 : len(ratios) - left_out + 1]
    else:
        logs = [math.log(r) for r in ratios]
        half = float(stdtrit(len(logs) - 1, 1 - 0.025 / looks)) * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = (math.exp(statistics.fmean(logs) + side) for side in (-half, min(half, 50.0)))
    return Estimate(plain.value, min(plain.low, low), max(plain.high, high), plain.n, "x")


def without(steps: Sequence[float], parts: Sequence[float]) -> Estimate | None:
    """step / (step - part): how many times as fast by arithmetic, with a bootstrap interval; None without a step.

    Steps are drawn with their parts, so that a part that few steps have gets the wide interval that it deserves.
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

    None on a device that works beside the host, where the host's time may cost nothing; rare parts are priced there by
    how much the steps that have them are longer than the others.
    """
    most = max(ranks, key=lambda f: part_s(f, *kinds))
    hidden = most.device != "cpu" and not set(kinds) <= set(rare_kinds(most))
    return (None if hidden else without(steps_s(ranks), lost_s(most, *kinds))), most


def lost_s(profile: Profile, *kinds: str) -> list[float]:
    """What parts take of each step; rare ones, on a device beside the host, with the device's share in them."""
    parts = [profile.spans_s.get(k, [0.0] * len(profile.step_s)) for k in kinds]
    lost = [sum(of) for of in zip(*parts, strict=False)]
    if kinds == ("data",) and lost and profile.restarts:  # what starting workers takes has a finding of its own
        usual = statistics.median([s for i, s in enumerate(lost) if i not in profile.restarts] or [0.0])
        lost = [usual if i in profile.restarts else s for i, s in enumerate(lost)]
    if profile.device == "cpu" or not set(kinds) <= set(rare_kinds(profile)):
        return lost
    return longer_s(profile.step_s, [i for i, s in enumerate(lost) if s])


def longer_s(steps: Sequence[float], at: Sequence[int]) -> list[float]:
    """Of each step: by how much it is longer than the median of those that are not `at`; 0 for these."""
    usual = statistics.median([s for i, s in enumerate(steps) if i not in at] or steps)
    return [max(0.0, s - usual) if i in at else 0.0 for i, s in enumerate(steps)]


def split(ranks: Sequence[Profile]) -> bool:
    """Whether ranks train different weights, as a pipeline's stages: then they wait for each other by design."""
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


def growth(series: Sequence[float], unit: str, at: Sequence[float]) -> Estimate | None:
    """By how much a series grows per step, from medians of blocks of it. None if it is too short to tell.

    `at`: the steps at which it was taken.
    What grows by itself goes on in each block; what settles, or jumps once, does not: then the interval holds 0.
    """
    size = len(series) // BLOCKS
    if not size:
        return None
    both = [values[len(series) - size * BLOCKS :] for values in (series, at)]
    blocks = ([statistics.median(of[i : i + size]) for i in range(0, len(of), size)] for of in both)
    grown, steps = ([b - a for a, b in itertools.pairwise(of)] for of in blocks)
    return estimate([g / n for g, n in zip(grown, steps, strict=True)], unit, resamples=RESAMPLES)
