"""How long the slowest of n takes: expected maxima, by formula and from measured times. Pure functions.

Ranks that train together wait for the last one in every step, so the mean of the maximum counts, not the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labs.kit.errors import require


def of_exponential(mean: float, n: int) -> float:
    """Expected largest of n independent exponential delays: mean x (1 + 1/2 + ... + 1/n). Grows as log n."""
    require(n >= 1, f"of at least one rank, not {n}")
    return mean * sum(1 / k for k in range(1, n + 1))


def of_rare(share: float, delay: float, n: int) -> float:
    """Expected largest of n delays that are `delay` in a `share` of all steps and nothing otherwise.

    delay (1 - (1 - share)^n): up to 1 / share ranks it grows as n, beyond that every step is hit.
    """
    require(n >= 1 and 0 <= share <= 1, f"of at least one rank, with a share of steps, not {n} and {share}")
    return delay * (1 - (1 - share) ** n)


def of_samples(samples: Sequence[float], n: int) -> float:
    """Expected largest of n draws from `samples`, with replacement: what resampling tends to, without the dice.

    Sum of the sorted x_k times (k/N)^n - ((k-1)/N)^n. No draw exceeds the largest sample, so for n near their number N
    and above it the answer is a lower bound.
    """
    require(n >= 1 and len(samples) >= 1, f"of at least one rank and one sample, not {n} and {len(samples)}")
    x = np.sort(np.asarray(samples, float))
    below = (np.arange(len(x) + 1) / len(x)) ** n
    return float((x * np.diff(below)).sum())
