"""Way 11: one rank's clock, where the slowest rank decides."""

from __future__ import annotations

from collections.abc import Callable

from labs.kit import measure
from labs.kit.rank import Rank


def one_clock_of_many(my_part: Callable[[], object], rank: Rank) -> tuple[float, float]:
    """(fooled, honest) seconds of work that the ranks share: by this rank's clock, and by that of the slowest."""
    rank.barrier()  # all start together
    [mine] = measure.time_steps(my_part, 1, rank.device)
    [slowest] = rank.slowest([mine])
    return mine, slowest
