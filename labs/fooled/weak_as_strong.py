"""Way 7: the batch grows with the ranks, and the answer is told as a speed-up of the same training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from labs.kit import measure
from labs.kit.rank import Rank


def weak_told_as_strong(steps: Mapping[str, Callable[[], object]], rounds: int, rank: Rank) -> tuple[float, float]:
    """(fooled, honest) speed-up of all ranks over one: with a whole batch on each rank, and with one batch shared.

    `steps` are those of "alone", one rank with one batch; "a batch each"; "one batch shared".
    """
    seconds = measure.interleave(steps, rounds, rank.device, between=rank.barrier)
    took = {name: statistics.median(rank.slowest(samples)) for name, samples in seconds.items()}
    weak = rank.world_size * took["alone"] / took["a batch each"]  # samples per second, of another training
    strong = took["alone"] / took["one batch shared"]  # the same samples in the same step
    return weak, strong
