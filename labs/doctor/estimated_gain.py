"""Compute a whole job's times from its ranks' profiles, and estimated gains with their intervals.

A job's step takes as long as its slowest rank's, which may be a different rank in each round or step.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from labs.doctor.profile import AS_IS, Profile, rare_kinds
from labs.kit.measure import Estimate, estimate, fewest

WORTH = 1.05  # Smaller gains aren't reported
WORTH_BY_PARTS = 1.10  # Higher, because without the part a step may wait for something else
FINE = 1.10  # An interval that ends below this shows that there is little to gain; a wider one is inconclusive
SAME_WEIGHTS = 1e-9  # FP64 sums of the same weights differ by less than this share
RESAMPLES = 2_000
BLOCKS = fewest() + 1  # In `growth`: they have as many differences between neighbours as an interval needs


def steps_s(ranks: Sequence[Profile]) -> list[float]:
    """Return the whole job's time of each unchanged step."""
    return [max(steps) for steps in zip(*(f.step_s for f in ranks), strict=False)]


def even_s(ranks: Sequence[Profile]) -> list[float]:
    """Return `steps_s` with rare parts (a validation, a save) spread evenly over all steps."""
    each = []
    for f in ranks:
        lost = lost_s(f, *rare_kinds(f)) or [0.0] * len(f.step_s)
        each.append([s - part + statistics.fmean(lost) for s, part in zip(f.step_s, lost, strict=True)])
    return [max(steps) for steps in zip(*each, strict=False)]


def samples_per_s(ranks: Sequence[Profile]) -> Estimate | None:
    """Return the samples per second of all ranks together; None if a rank couldn't count its samples."""
    if any(not f.samples for f in ranks) or not steps_s(ranks):
        return None
    samples = sum(f.samples for f in ranks)
    return estimate([samples / s for s in even_s(ranks)], "samples/s", resamples=RESAMPLES)


def part_s(profile: Profile, *kinds: str) -> float:
    """Return the mean seconds of these kinds per step, over all steps, including those without them."""
    return sum(statistics.fmean(profile.spans_s[k]) for k in kinds if profile.spans_s.get(k))


def turns_s(ranks: Sequence[Profile], mode: str) -> list[tuple[list[float], list[float]]]:
    """Return (each rank's mean unchanged step, its mean step in `mode`) for each round that has both on all ranks."""
    sides = (zip(*(f.interleaved_s.get(name, []) for f in ranks), strict=False) for name in (AS_IS, mode))
    return [tuple([statistics.fmean(turn) for turn in side] for side in both) for both in zip(*sides, strict=False)]


def pairs_s(ranks: Sequence[Profile], mode: str) -> list[tuple[float, float]]:
    """Return (the job's unchanged step, its step in `mode`) in s, for each round that has both."""
    return [(max(a), max(b)) for a, b in turns_s(ranks, mode)]


def interleaved(ranks: Sequence[Profile], mode: str, more_s: float = 0.0) -> Estimate | None:
    """Return the speedup in `mode`: the median over rounds of unchanged / mode. None if it wasn't tried.

    `more_s`: seconds that the fix itself adds to a step.
    """
    ratios = [a / (b + more_s) for a, b in pairs_s(ranks, mode) if b > 0]
    return of_ratios(ratios, looks(ranks)) if ratios else None


def looks(ranks: Sequence[Profile]) -> int:
    """Return how many intervals the report tests: one per counterfactual, one per rank for being late."""
    return max(len(ranks[0].interleaved_s) - 1, 0) + len(ranks)


def of_ratios(ratios: Sequence[float], looks: int) -> Estimate:
    """Return the median. Its interval and those of all other `looks` are jointly right in 95 % of runs (Bonferroni).

    It is the sign test's, which outliers don't widen; with too few rounds for that, Student's t on the logarithms.
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
    """Return step / (step - part), the speedup by arithmetic, with a bootstrap interval; None without steps.

    Steps are resampled together with their parts, so a part that only few steps have gets a wide interval.
    """
    pairs = [(s, s - min(max(p, 0.0), 0.99 * s)) for s, p in zip(steps, parts, strict=False) if s > 0]
    if not pairs:
        return None
    import numpy as np

    both = np.array(pairs)  # (steps, 2): unchanged, without the part
    drawn = both[np.random.default_rng(0).integers(len(both), size=(RESAMPLES, len(both)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    value = float(both[:, 0].sum() / both[:, 1].sum())
    return Estimate(value, min(float(low), value), max(float(high), value), len(pairs), "x")


def from_parts(ranks: Sequence[Profile], *kinds: str) -> tuple[Estimate | None, Profile]:
    """Return the gain without these parts, by arithmetic, and the profile of the rank that has most of them.

    On a GPU the gain is None, because the host's time may be hidden, unless the parts are rare: then it is computed
    from how much longer the steps that have them are.
    """
    most = max(ranks, key=lambda f: part_s(f, *kinds))
    hidden = most.device != "cpu" and not set(kinds) <= set(rare_kinds(most))
    return (None if hidden else without(steps_s(ranks), lost_s(most, *kinds))), most


def lost_s(profile: Profile, *kinds: str) -> list[float]:
    """Return what the parts take of each step; for rare ones on a GPU, how much longer the steps with them are."""
    parts = [profile.spans_s.get(k, [0.0] * len(profile.step_s)) for k in kinds]
    lost = [sum(of) for of in zip(*parts, strict=False)]
    if kinds == ("data",) and lost and profile.restarts:  # starting workers has a separate finding
        usual = statistics.median([s for i, s in enumerate(lost) if i not in profile.restarts] or [0.0])
        lost = [usual if i in profile.restarts else s for i, s in enumerate(lost)]
    if profile.device == "cpu" or not set(kinds) <= set(rare_kinds(profile)):
        return lost
    return longer_s(profile.step_s, [i for i, s in enumerate(lost) if s])


def longer_s(steps: Sequence[float], at: Sequence[int]) -> list[float]:
    """Return how much longer each step with an index in `at` is than the median of the others; 0 for the others."""
    usual = statistics.median([s for i, s in enumerate(steps) if i not in at] or steps)
    return [max(0.0, s - usual) if i in at else 0.0 for i, s in enumerate(steps)]


def split(ranks: Sequence[Profile]) -> bool:
    """Return whether ranks train different weights, as pipeline stages do: then they wait for each other by design."""
    of = [f.training for f in ranks]
    if len({row.get("shapes") for row in of}) > 1:
        return True
    if any(row.get("ddp") or row.get("fsdp") for row in of):  # ranks hold the same weights, or equal shards
        return False
    sums = [row.get("weights", 0.0) for row in of]
    return max(sums) - min(sums) > SAME_WEIGHTS * max(map(abs, sums))


def enough(gain: Estimate | None) -> bool:
    """Return whether a gain has enough samples for its interval."""
    return gain is not None and gain.n >= fewest()


def standing(gain: Estimate, worth: float = WORTH) -> str:
    """Return "gain", "fine" (too little to gain) or "unclear" (inconclusive)."""
    if enough(gain) and gain.low > 1 and gain.value >= worth:
        return "gain"
    return "fine" if enough(gain) and gain.high < FINE else "unclear"


def growth(series: Sequence[float], unit: str, at: Sequence[float]) -> Estimate | None:
    """Return how much a series grows per step, from the medians of blocks. None with fewer than BLOCKS values.

    `at`: the step of each value.
    A leak grows in every block. What settles, or jumps once, doesn't, so its interval contains 0.
    """
    size = len(series) // BLOCKS
    if not size:
        return None
    both = [values[len(series) - size * BLOCKS :] for values in (series, at)]
    blocks = ([statistics.median(of[i : i + size]) for i in range(0, len(of), size)] for of in both)
    grown, steps = ([b - a for a, b in itertools.pairwise(of)] for of in blocks)
    return estimate([g / n for g, n in zip(grown, steps, strict=True)], unit, resamples=RESAMPLES)
