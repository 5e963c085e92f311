"""Whose random numbers do DataLoader workers draw?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader

from labs.common.traps.datasets import (
    Draws,
    from_held_generator,
    from_numpy,
    from_own_generator,
    from_random,
    from_torch,
    replace_generator,
    seed_alike,
    seed_by_id,
)

BATCH = 4


class Way(NamedTuple):
    """How an augmentation draws, what a worker does first, and whether draws repeat across workers and epochs."""

    draw: Callable[[Draws], float]
    worker_init_fn: Callable[[int], None] | None = None
    workers_repeat: bool = False
    epochs_repeat: bool = False


WAYS = {
    "torch": Way(from_torch),
    "Python random": Way(from_random),
    "NumPy global state": Way(from_numpy),
    "NumPy global state, seed(0) in worker_init_fn": Way(from_numpy, seed_alike, True, True),
    "NumPy global state, seed(worker) in worker_init_fn": Way(from_numpy, seed_by_id, False, True),
    "Generator of the dataset": Way(from_held_generator, None, True, True),
    "Generator of the dataset, renewed in worker_init_fn": Way(from_held_generator, replace_generator),
    "Generator of each worker": Way(from_own_generator),
}


def duplicate_share(draws: Sequence[float]) -> float:
    """Share of `draws` that repeat an earlier one."""
    return 1 - len(set(draws)) / len(draws)


def repeated_share(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of items for which the second epoch draws what the first one drew."""
    return sum(x == y for x, y in zip(first, second, strict=True)) / len(first)


def expected_share(workers: int) -> float:
    """`duplicate_share` where all workers draw the same numbers."""
    return 1 - 1 / workers


def epochs(way: Way, workers: int, seed: int, n: int = 2) -> list[list[float]]:
    """Draws of `n` epochs over 4 batches per worker, with new workers each time, as a DataLoader does by default."""
    torch.manual_seed(seed)  # the base seed of workers comes from torch's global state in the trainer
    dataset = Draws(4 * BATCH * workers, way.draw, seed)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, worker_init_fn=way.worker_init_fn)
    return [[x for batch in loader for x in batch.tolist()] for _ in range(n)]


def ranks_share(workers: int, seed: int, by_rank: bool) -> float:
    """Share of rank 1's draws that rank 0 has drawn too, both from torch, in workers.

    Seeding all ranks alike, which makes their models equal, makes their workers equal too. With `by_rank` the
    loader gets a generator of its own, seeded with the rank.
    """
    drawn = []
    for rank in range(2):
        torch.manual_seed(seed)
        own = torch.Generator().manual_seed(seed + rank) if by_rank else None
        dataset = Draws(4 * BATCH * workers, from_torch, seed)
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers, generator=own)
        drawn.append([x for batch in loader for x in batch.tolist()])
    return len(set(drawn[0]) & set(drawn[1])) / len(set(drawn[1]))
