"""Way 12: a rate that was measured at one size, told for another."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from labs.kit import measure
from labs.kit.rank import Rank


def rate_of_another_size(
    exchange: Callable[[int], object], small: int, large: int, rounds: int, rank: Rank
) -> tuple[float, float]:
    """(fooled, honest) seconds to exchange `large` bytes: by the rate of `small` ones, and as it takes.

    `exchange(n)` all-reduces n bytes; all ranks call it together.
    """
    sizes = {n: lambda n=n: exchange(n) for n in (small, large)}
    seconds = measure.interleave(sizes, rounds, rank.device, between=rank.barrier)
    small_s, large_s = (statistics.median(rank.slowest(seconds[n])) for n in (small, large))
    bytes_per_s = small / small_s
    return large / bytes_per_s, large_s
