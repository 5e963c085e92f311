"""How long the slowest of n ranks takes: expected maxima, by formula.

Ranks that train together wait for the last one in every step, so the mean of the maximum counts, not the mean.
"""

from __future__ import annotations

from statistics import NormalDist

from labs.kit.errors import require


def of_normal(n: int) -> float:
    """Return the expected maximum of n standard normal numbers: Phi^-1((n - 3/8) / (n + 1/4)) (Blom 1958)."""
    require(n >= 1, f"give at least one rank, not {n}")
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def of_exponential(mean: float, n: int) -> float:
    """Return the expected maximum of n independent exponential delays, mean x (1 + 1/2 + ... + 1/n): grows as log n."""
    require(n >= 1, f"give at least one rank, not {n}")
    return mean * sum(1 / k for k in range(1, n + 1))


def of_rare(share: float, delay: float, n: int) -> float:
    """Return the expected maximum of n delays that are `delay` in a `share` of all steps and otherwise 0.

    delay (1 - (1 - share)^n): grows as n up to 1 / share ranks; beyond that, nearly every step is hit.
    """
    require(n >= 1 and 0 <= share <= 1, f"give at least one rank and a share of steps, not {n} and {share}")
    return delay * (1 - (1 - share) ** n)
