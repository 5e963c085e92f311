"""The editable round of notebook 00: a learner's own triad beside the course's, in turn, on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.common.timing.probing import memory_steps
from labs.kit import measure
from labs.kit.launch import run_on_ranks

ROUNDS, CALLS, ARRAY_BYTES = 8, 8, 64 * 2**20
NEAR = 1.3  # caches make a larger difference than that; another way to write the same loop does not


def compare_with_memory(triad: Callable[[], float], ranks: int) -> None:
    """Print the bytes per second that `triad()` returns on each rank, over those of the course's own triad.

    Both take turns, so that a slow spell of the machine hits both. Ranks run on CPU cores.
    """
    for rank, (own, memory) in enumerate(run_on_ranks(_in_turn, ranks, triad)):
        ratio = measure.paired_ratio(own, memory)
        rates = f"{measure.estimate(own, 'B/s')}, over that of {ARRAY_BYTES // 2**20} MiB arrays: {ratio}"
        if ratio.low > NEAR:
            print(f"rank {rank}: {rates}. Memory does not give that: most of these bytes come from elsewhere.")
        elif ratio.high < 1 / NEAR:
            print(f"rank {rank}: {rates}. Memory gives more: something else limits this loop, or fewer bytes count.")
        elif ratio.low > 1 / NEAR and ratio.high < NEAR:
            print(f"rank {rank}: {rates}. So this is the speed of memory.")
        else:
            print(f"rank {rank}: {rates}. Whether this is the speed of memory, so wide an interval cannot tell.")


def _in_turn(triad: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Bytes per second of the learner's triad and of the course's, once per round."""
    step, moved = memory_steps(ARRAY_BYTES, torch.device("cpu"))["triad"]
    own, memory = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        own.append(float(triad()))
        dist.barrier()
        memory.append(CALLS * moved / sum(measure.time_steps(step, CALLS, torch.device("cpu"))))
    return own, memory
