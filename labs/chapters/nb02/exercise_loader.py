"""Run DataLoader workers for a check, and the checker of notebook 02 that asks who reads which shard."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from labs.common.loading.feed import any_number_of_workers, running
from labs.kit.check import Mistake

Function = Callable[..., Any]
WAIT_S = 15.0
"""How long the loader waits for an item. A worker that hangs ends by itself half a second later."""


def read(
    dataset: Dataset,
    workers: int,
    *,
    worker_init: Callable[[int], object] = lambda worker_id: None,
    torch_seeds: torch.Generator | None = None,
) -> list[Any]:
    """The items of one epoch, through `workers` forked processes that have ended when this returns or raises."""

    def init(worker_id: int) -> None:
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))  # 0: torch raises in the main process otherwise
        signal.setitimer(signal.ITIMER_REAL, WAIT_S + 0.5)
        worker_init(worker_id)

    settings = {"multiprocessing_context": "fork", "timeout": WAIT_S, "worker_init_fn": init} if workers else {}
    with any_number_of_workers():
        loader = DataLoader(
            dataset, None, num_workers=workers, collate_fn=_unchanged, generator=torch_seeds, **settings
        )
    try:
        with running(loader) as items:
            return list(items)
    except RuntimeError as e:
        if "DataLoader timed out" not in str(e):
            raise
        raise Mistake(f"a worker gave nothing for {WAIT_S:g} s", "look for a loop that never ends") from None


def _unchanged(item: Any) -> Any:
    return item


SHARDS = [f"tiles-{i:02d}.tar" for i in range(10)]
Reads = dict[tuple[int, int], list[str]]  # {(rank, worker): shards that it read, in order}


class Shards(IterableDataset):
    """One item per process: (worker, the shards that it would read, the same asked a second time)."""

    def __init__(self, f: Function, shards: list[str], rank: int, world_size: int) -> None:
        self.f, self.shards, self.rank, self.world_size = f, shards, rank, world_size

    def __iter__(self) -> Iterator[tuple[int, Any, Any]]:
        answers = [self.f(list(self.shards), self.rank, self.world_size) for _ in range(2)]
        worker = get_worker_info()
        yield (worker.id if worker else 0, *(a if _no_list(a) else list(a) for a in answers))


def _no_list(answer: Any) -> bool:
    return isinstance(answer, str) or not isinstance(answer, Iterable)


def check_my_shards(f: Function) -> None:
    """Every shard is read by exactly one worker of one rank, in fair parts, with workers and without."""
    _check_reads(_reads(f, 10, 2, 3), 10, 2, 3)
    try:
        alone = _reads(f, 9, 2, 0)
    except (AttributeError, TypeError) as e:
        if "NoneType" not in str(e):
            raise
        raise Mistake(
            "with num_workers=0 there is no worker: get_worker_info() returns None, and your code fails on it",
            "the main process then reads everything that its rank has to read",
        ) from e
    _check_reads(alone, 9, 2, 0)
    for shards, ranks, workers in ((7, 3, 2), (3, 2, 2)):
        _check_reads(_reads(f, shards, ranks, workers), shards, ranks, workers)


def _reads(f: Function, shards: int, ranks: int, workers: int) -> Reads:
    reads: Reads = {}
    for rank in range(ranks):
        for worker, answer, asked_again in read(Shards(f, SHARDS[:shards], rank, ranks), workers):
            if _no_list(answer) or any(name not in SHARDS for name in answer):
                raise Mistake(f"{answer!r:.60} is not a list of shards", "return (or yield) entries of `shards`")
            if answer != asked_again:
                raise Mistake(
                    f"asked twice, worker {worker} of rank {rank} would read {_list(answer)}, then "
                    f"{_list(asked_again)}: no two processes could agree who reads what",
                    "nothing random here: ids alone decide. Shuffle before, with one seed for all processes",
                )
            reads[rank, worker] = answer
    return reads


def _list(shards: list[str]) -> str:
    return ", ".join(shards[:4]) + (", ..." if len(shards) > 4 else "") if shards else "nothing"


def _who(process: tuple[int, int]) -> str:
    return f"worker {process[1]} of rank {process[0]}"


def _check_reads(reads: Reads, shards: int, ranks: int, workers: int) -> None:
    case = f"{shards} shards, {ranks} ranks, num_workers={workers}: "
    by_workers = [[reads[r, w] for r in range(ranks)] for w in range(max(workers, 1))]
    by_ranks = list(zip(*by_workers, strict=True))
    rank_ignored = all(all(a == answers[0] for a in answers) for answers in by_workers)
    worker_ignored = workers > 1 and all(all(a == answers[0] for a in answers) for answers in by_ranks)
    if not any(reads.values()):
        raise Mistake(
            f"{case}nobody reads anything",
            "every process must get its part"
            if workers
            else "without workers the main process reads what its rank has to read",
        )
    if rank_ignored and worker_ignored:
        raise Mistake(
            f"{case}all {len(reads)} processes read the same, {_list(reads[0, 0])}: each of these samples "
            f"comes {len(reads)} times in an epoch",
            "two numbers tell the processes apart: rank, and get_worker_info().id",
        )
    if rank_ignored:
        reader = "worker 0 of each" if workers else "each"
        raise Mistake(
            f"{case}the ranks read the same: {reader} reads {_list(reads[0, 0])}, so {ranks} GPUs train on "
            "the same samples",
            "a worker counts only the workers of its own rank: cut by rank as well"
            if workers
            else "get_worker_info() is None: this process is alone on its rank, not in the job",
        )
    if worker_ignored:
        raise Mistake(
            f"{case}the workers of a rank read the same: on rank 0 each reads {_list(reads[0, 0])}, so their "
            f"samples come {workers} times",
            "share the rank's shards among its workers: get_worker_info() knows id and num_workers",
        )
    _check_once(reads, SHARDS[:shards], case)
    _check_fair(reads, ranks, case)


def _check_once(reads: Reads, shards: list[str], case: str) -> None:
    count = Counter(name for answer in reads.values() for name in answer)
    missing, twice = [s for s in shards if not count[s]], [s for s in shards if count[s] > 1]
    if twice:
        readers = [_who(p) for p, answer in reads.items() for name in answer if name == twice[0]]
        nobody = f", and nobody reads {missing[0]}" if missing else ""
        raise Mistake(
            f"{case}{readers[0]} and {readers[1]} both read {twice[0]}{nobody}"
            if readers[0] != readers[1]
            else f"{case}{readers[0]} reads {twice[0]} twice{nobody}",
            f"give the {len(reads)} processes numbers of their own, made of rank and worker id; each takes "
            f"every {len(reads)}th shard, beginning at its number",
        )
    if missing:
        hint = "with steps in place of blocks, such as shards[first::step], no rest is left"
        if missing == shards[-len(missing) :]:
            hint = f"{len(shards)} does not divide evenly by {len(reads)}: {hint}"
        elif missing[0] == shards[0]:
            hint = "count from 0: ranks and worker ids do"
        raise Mistake(f"{case}nobody reads {_list(missing)}", hint)


def _check_fair(reads: Reads, ranks: int, case: str) -> None:
    once = f"{case}every shard is read once, but "
    for rank in range(ranks):
        own = [len(answer) for (r, _), answer in reads.items() if r == rank]
        if max(own) - min(own) > 1:
            raise Mistake(
                f"{once}the workers of rank {rank} read {_numbers(own)} of them",
                "deal them out like cards: then no worker gets two more than another",
            )
    by_rank = [sum(len(answer) for (r, _), answer in reads.items() if r == rank) for rank in range(ranks)]
    if max(by_rank) - min(by_rank) > 1:
        raise Mistake(
            f"{once}the ranks read {_numbers(by_rank)}: the rank that is done first leaves the others "
            "waiting in all-reduce",
            "deal to the ranks first: shards[rank::world_size]; then each rank's part to its workers",
        )


def _numbers(counts: list[int]) -> str:
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
