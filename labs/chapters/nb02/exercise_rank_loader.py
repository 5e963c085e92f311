"""Checker of notebook 02 on a loader for every rank: who reads what in which order, and what augmentation draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from labs.chapters.nb02.exercise_loader import WAIT_S
from labs.common.loading.feed import running
from labs.kit.check import Mistake

Function = Callable[..., Any]
ITEMS, BATCH, RANKS, EPOCHS, WORKERS, SEED = 24, 4, 2, 2, 2, 11
ALIKE = 5  # what all ranks seed torch with, as trainings do to make their models equal
Reads = dict[tuple[int, int], list[tuple[int, int, float]]]
"""{(rank, epoch): (item, worker, what its augmentation drew) in order}."""


class Augmented(Dataset):
    """Item: float64 (3,): its number, the worker, and one draw of the data set's own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        return torch.tensor([index, -1 if info is None else info.id, self.rng.random()], dtype=torch.float64)


def check_rank_loader(f: Function) -> None:
    """Every item once, another order and other draws in each epoch, on each rank and worker; all of it repeatable."""
    with torch.random.fork_rng(devices=[]):
        first = _run(f, SEED)
        _check_items(first)
        _check_order(first)
        _check_draws(first)
        _check_seed(first, _run(f, SEED), _run(f, SEED + 1))


def _run(f: Function, seed: int) -> Reads:
    """A training of two epochs on two ranks, one rank after the other."""
    reads: Reads = {}
    for rank in range(RANKS):
        torch.manual_seed(ALIKE)
        dataset = Augmented()
        for epoch in range(EPOCHS):
            before = torch.get_rng_state()
            loader = f(dataset, BATCH, rank, RANKS, epoch, seed)
            if not isinstance(loader, DataLoader):
                raise Mistake(f"a {type(loader).__name__} is no DataLoader", "return DataLoader(dataset, ...)")
            if not before.equal(torch.get_rng_state()):
                raise Mistake(
                    "you reset or used torch's global generator, which the model and its dropout draw from",
                    "a torch.Generator of its own: DataLoader(..., generator=...)",
                )
            reads[rank, epoch] = _read(loader)
    return reads


def _read(loader: DataLoader) -> list[tuple[int, int, float]]:
    if loader.num_workers != WORKERS:
        raise Mistake(f"your loader has num_workers={loader.num_workers}", f"num_workers={WORKERS} was asked for")
    loader.multiprocessing_context, loader.timeout = "fork", WAIT_S  # fork: your functions are in a cell
    try:
        with running(loader) as batches:
            return [(int(i), int(w), float(x)) for batch in batches for i, w, x in batch.tolist()]
    except RuntimeError as e:
        if "DataLoader timed out" not in str(e):
            raise
        raise Mistake(f"a worker gave nothing for {WAIT_S:g} s", "look for a loop that never ends") from None


def _check_items(reads: Reads) -> None:
    for epoch in range(EPOCHS):
        by_rank = [[i for i, *_ in reads[rank, epoch]] for rank in range(RANKS)]
        if all(len(items) == ITEMS for items in by_rank):
            raise Mistake(
                f"each rank reads all {ITEMS} items: {RANKS} ranks do the same work {RANKS} times",
                "a DistributedSampler(dataset, num_replicas, rank) gives each rank its part",
            )
        if set(by_rank[0]) == set(by_rank[1]):
            raise Mistake(
                "both ranks read the same items, and the others are read by nobody",
                "the sampler must be told which rank this is",
            )
        count = Counter(i for items in by_rank for i in items)
        if len(count) < ITEMS or max(count.values()) > 1:
            twice = sum(n > 1 for n in count.values())
            raise Mistake(
                f"in epoch {epoch} {ITEMS - len(count)} items are read by nobody, {twice} more than once",
                f"{ITEMS} items, {RANKS} ranks, batches of {BATCH}: it comes out even, nothing is dropped, "
                "and all ranks must shuffle alike before they share",
            )


def _check_order(reads: Reads) -> None:
    first, second = ([i for i, *_ in reads[0, epoch]] for epoch in range(EPOCHS))
    if first == sorted(first) and second == sorted(second):
        raise Mistake("the items come in the order of their numbers", "shuffle them: training needs another order")
    if first == second:
        raise Mistake("both epochs have the same order", "sampler.set_epoch(epoch), before the loader is used")


def _check_draws(reads: Reads) -> None:
    for (rank, epoch), rows in reads.items():
        drawn = {w: {x for _, worker, x in rows if worker == w} for w in range(WORKERS)}
        if drawn[0] & drawn[1]:
            raise Mistake(
                f"on rank {rank}, epoch {epoch}, both workers draw the same numbers: each has a copy of dataset.rng",
                "worker_init_fn runs in every worker, where get_worker_info().dataset is its "
                "copy: give that a new generator, seeded with what differs between workers",
            )
    for a, b, what, why in (
        ((0, 0, 1), (1, 0, 0), "worker 0 of rank 1 draws the numbers of worker 1 of rank 0", "rank + worker"),
        ((0, 0, 1), (0, 1, 0), "worker 0 draws in epoch 1 what worker 1 draws in epoch 0", "epoch + worker"),
    ):
        drawn = [{x for _, worker, x in reads[rank, epoch] if worker == w} for rank, epoch, w in (a, b)]
        if drawn[0] & drawn[1]:
            raise Mistake(
                what,
                f"a sum such as {why} is the same for (0, 1) and (1, 0), so two generators get one "
                "seed: combine the numbers so that no two are alike",
            )
    for what, hint, a, b in (
        (
            "rank 1 draws the numbers of rank 0",
            "all ranks have seeded torch alike, so the workers' seeds are alike: "
            "DataLoader(..., generator=...) with one that is seeded with the rank, too",
            (0, 0),
            (1, 0),
        ),
        (
            "epoch 1 draws the numbers of epoch 0 again",
            "a seed made of rank and worker alone is the same in every epoch: put the epoch into it",
            (0, 0),
            (0, 1),
        ),
        (
            "rank 1 draws in epoch 0 what rank 0 draws in epoch 1",
            "seed + rank + epoch is the same for (0, 1) and (1, 0): combine them so that no two are alike",
            (1, 0),
            (0, 1),
        ),
    ):
        if {x for *_, x in reads[a]} & {x for *_, x in reads[b]}:
            raise Mistake(what, hint)


def _check_seed(first: Reads, again: Reads, other: Reads) -> None:
    if first != again:
        what = "reads another order" if _items(first) != _items(again) else "draws other numbers"
        raise Mistake(
            f"a second run with the same seed {what}: nobody can repeat your training",
            "no clock, no pid, no default_rng() without a seed",
        )
    for what, values in (("order", _items), ("draws", lambda reads: [x for rows in reads.values() for *_, x in rows])):
        if values(first) == values(other):
            raise Mistake(f"another seed changes nothing in the {what}", "use the argument `seed` there as well")


def _items(reads: Reads) -> list[int]:
    return [i for rows in reads.values() for i, *_ in rows]
