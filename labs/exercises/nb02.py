"""Exercises of notebook 02: a loader for each rank, what limits a training run, shards with equal steps."""

from __future__ import annotations

import functools
import io
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from labs.common.loading.feed import any_number_of_workers, running
from labs.kit.check import Mistake
from labs.kit.exercise import Exercise, KnownMistake

WAIT_S = 15.0
"""How long a loader waits for an item."""
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


# -- 02.1 a loader for each rank


def seed_worker(seed: int, rank: int, epoch: int, worker: int) -> None:
    """Give each worker of each rank and epoch its own generator. A worker_init_fn, once all but `worker` is bound."""
    get_worker_info().dataset.rng = np.random.default_rng([seed, rank, epoch, worker])


def rank_loader(dataset: Dataset, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    """Return the loader of `rank` in `epoch`. Each has its own order and draws, and repeats them if run again."""
    sampler = DistributedSampler(dataset, world_size, rank, seed=seed)
    sampler.set_epoch(epoch)  # otherwise every epoch has the order of epoch 0
    init = functools.partial(seed_worker, seed, rank, epoch)  # can be pickled, because seed_worker is at module level
    first = int(np.random.SeedSequence([seed, rank, epoch]).generate_state(1)[0])
    generator = torch.Generator().manual_seed(first)  # workers' torch seeds come from it, not from the global state
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=init, generator=generator)


ITEMS, BATCH, RANKS, EPOCHS, SEED = 24, 4, 2, 2, 11
Rows = list[tuple[int, float, float]]


class Augmented(Dataset):
    """Items are float64 tensors (3,): the item's number, a draw of the dataset's generator and one of torch's."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([i, self.rng.random(), torch.rand(()).item()], dtype=torch.float64)


class _Sent(pickle.Pickler):
    """Pickles as for a worker that isn't forked, but treats a top-level function of a cell like a module's."""

    def reducer_override(self, value: Any) -> Any:
        of_a_cell = isinstance(value, FunctionType | type) and value.__module__ == "__main__"
        if of_a_cell and "<" not in value.__qualname__:
            return cloudpickle.loads, (cloudpickle.dumps(value),)
        return NotImplemented


class _Init:
    """A worker_init_fn after pickling."""

    def __init__(self, function: Callable[[int], object]) -> None:
        file = io.BytesIO()
        _Sent(file).dump(function)
        self.pickled = file.getvalue()

    def __call__(self, worker: int) -> None:
        if (function := pickle.loads(self.pickled)) is not None:
            function(worker)


def observe_rank_loader(answer: Callable[..., DataLoader]) -> dict[str, Any]:
    """Return what two ranks read and draw in two epochs, in workers that aren't forked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)  # ranks use the same torch seed, so that their models are equal
        before = torch.get_rng_state()
        first = answer(Augmented(), BATCH, 0, RANKS, 0, SEED)
        seen: dict[str, Any] = {
            "what you return": type(first).__name__,
            "num_workers": getattr(first, "num_workers", None),
        }
        if seen["num_workers"] != 2:
            return seen
        try:
            _Init(first.worker_init_fn)
        except (AttributeError, TypeError, pickle.PicklingError):
            return seen | {f"workers can start by {METHOD}": False}
        seen[f"workers can start by {METHOD}"] = True
        rows = {(r, e): _rows(answer, r, e, SEED) for r in range(RANKS) for e in range(EPOCHS)}
        again, other = _rows(answer, 0, 0, SEED), _rows(answer, 0, 0, SEED + 1)
        kept = before.equal(torch.get_rng_state())  # each loader was made and read after the same seed
    read = {key: [i for i, _, _ in found] for key, found in rows.items()}
    draws = {key: [x for _, x, _ in found] for key, found in rows.items()}
    torch_draws = {t for found in rows.values() for _, _, t in found}
    count = Counter(read[0, 0] + read[1, 0])
    return seen | {
        "items that each rank reads in an epoch": [len(read[r, 0]) for r in range(RANKS)],
        "items that some rank reads": len(count),
        "the order is another one in the next epoch": read[0, 0] != read[0, 1],
        "the items are shuffled": read[0, 0] != sorted(read[0, 0]),
        "different numbers drawn by one rank in one epoch": len(set(draws[0, 0])),
        "different numbers drawn by both ranks in one epoch": len({*draws[0, 0], *draws[1, 0]}),
        "different numbers drawn by both ranks in two epochs": len({x for drawn in draws.values() for x in drawn}),
        "different numbers that both ranks draw from torch in two epochs": len(torch_draws),
        "torch's global random state is as it was": kept,
        "a second run with the same seed repeats the first": again == rows[0, 0],
        "another seed gives another order": [i for i, _, _ in other] != read[0, 0],
        "another seed gives other draws": not {x for _, x, _ in other} & set(draws[0, 0]),
        "another seed gives other draws from torch": not {t for *_, t in other} & {t for *_, t in rows[0, 0]},
    }


def _rows(answer: Callable[..., DataLoader], rank: int, epoch: int, seed: int) -> Rows:
    torch.manual_seed(5)
    loader = answer(Augmented(), BATCH, rank, RANKS, epoch, seed)
    loader.worker_init_fn = _Init(loader.worker_init_fn)
    loader.multiprocessing_context, loader.timeout = METHOD, WAIT_S
    return [(int(i), x, t) for batch in _items(loader) for i, x, t in batch.tolist()]


def _items(loader: DataLoader) -> list[Any]:
    """Return all batches. Raises Mistake if a worker hangs."""
    try:
        with running(loader) as batches:
            return list(batches)
    except RuntimeError as e:
        if "DataLoader timed out" not in str(e):
            raise
        raise Mistake(f"a worker gave nothing for {WAIT_S:g} s", "look for a loop that never ends") from None


def _closure(dataset: Any, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    loader = rank_loader(dataset, batch_size, rank, world_size, epoch, seed)
    loader.worker_init_fn = lambda worker: seed_worker(seed, rank, epoch, worker)
    return loader


def _copied_generator(*args: Any) -> DataLoader:
    loader = rank_loader(*args)
    loader.worker_init_fn = None
    return loader


def _same_on_every_rank(dataset: Any, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    loader = rank_loader(dataset, batch_size, rank, world_size, epoch, seed)
    loader.worker_init_fn = functools.partial(seed_worker, seed, 0, epoch)
    return loader


def _same_order(dataset: Any, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    loader = rank_loader(dataset, batch_size, rank, world_size, epoch, seed)
    loader.sampler.set_epoch(0)
    return loader


# -- 02.3 what limits a training run


def _printout(workers: int, model: float, loader: float, both: float, step: float, step_both: float) -> dict[str, Any]:
    wait = max(0.0, 100 * (1 - both * step_both / 1e3 / 64))
    return {
        "num_workers": workers,
        "model alone (images/s)": model,
        "loader alone (images/s)": loader,
        "together (images/s)": both,
        "step alone (ms)": step,
        "step together (ms)": step_both,
        "waiting for data (%)": round(wait),
    }


RUNS = {
    "A": _printout(8, 1200, 3100, 1180, 53, 53),
    "B": _printout(8, 4200, 1900, 1850, 15, 15),
    "C": _printout(2, 700, 760, 440, 91, 130),
    "D": _printout(0, 2000, 400, 335, 32, 32),
}
"""Made-up runs with batches of 64, one of each kind."""
HIDDEN = {
    "a model that waits for 12 % and still loses only 6 %": _printout(4, 1000, 1300, 940, 64, 60),
    "a loader and a model of the same rate, step twice as long": _printout(4, 900, 900, 520, 71, 118),
    "no worker, and a loader faster than the model": _printout(0, 300, 1500, 251, 213, 213),
    "a slow loader whose workers leave the step alone": _printout(16, 9000, 600, 590, 7, 7),
}


def limited_by(run: dict[str, Any]) -> str:
    """Return "turns", "model", "loader" or "cores"."""
    model, loader = run["model alone (images/s)"], run["loader alone (images/s)"]
    if run["num_workers"] == 0:
        return "turns"  # one process loads and trains in turn
    if run["together (images/s)"] < 0.9 * min(model, loader):
        return "cores"  # slower than the slower side
    return "model" if model < loader else "loader"


def observe_limits(answer: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Return the answer's word for each of the notebook's runs, and for others."""
    return {f"run {name}": answer(dict(run)) for name, run in RUNS.items()} | {
        what: answer(dict(run)) for what, run in HIDDEN.items()
    }


def _slower_side(run: dict[str, Any]) -> str:
    if run["num_workers"] == 0:
        return "turns"
    return "model" if run["model alone (images/s)"] < run["loader alone (images/s)"] else "loader"


def _by_waiting(run: dict[str, Any]) -> str:
    found = limited_by(run)
    return found if found in ("turns", "cores") else "loader" if run["waiting for data (%)"] > 10 else "model"


def _without_turns(run: dict[str, Any]) -> str:
    return limited_by(run | {"num_workers": 1})


# -- 02.4 shards with equal steps


def my_shards(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    """Return this process's shards. Every rank reads the same number; any left over are skipped."""
    each = len(shards) // world_size
    of_this_rank = shards[rank : each * world_size : world_size]
    worker = get_worker_info()
    if worker is None:  # num_workers=0: the main process reads all of its rank's shards
        return of_this_rank
    return of_this_rank[worker.id :: worker.num_workers]


NAMES = [f"tiles-{i:02d}.tar" for i in range(16)]
CASES = ((8, 2, 2), (11, 2, 2), (10, 4, 3), (9, 2, 0))
"""(shards, ranks, workers per rank)."""


class Shards(IterableDataset):
    """Yields one item per process: the shards that it would read, asked for twice."""

    def __init__(self, answer: Callable[..., Any], shards: Sequence[str], rank: int, world_size: int) -> None:
        self.pickled, self.arguments = cloudpickle.dumps(answer), (list(shards), rank, world_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        answer = cloudpickle.loads(self.pickled)
        yield tuple(_listed(answer(*self.arguments)) for _ in range(2))


def _shared(sets: Sequence[set[str]]) -> set[str]:
    return {name for i, one in enumerate(sets) for other in sets[i + 1 :] for name in one & other}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else f"{value!r:.40}"


def _as_it_is(item: Any) -> Any:
    return item


def observe_shards(answer: Callable[..., Any]) -> dict[str, Any]:
    """Return which process reads how many shards, in real workers."""
    seen: dict[str, Any] = {}
    for shards, ranks, workers in CASES:
        case = f"{shards} shards, {ranks} ranks, num_workers={workers}: "
        reads = [_reads(answer, NAMES[:shards], rank, ranks, workers) for rank in range(ranks)]
        if strange := [part for rank in reads for part, _ in rank if not isinstance(part, list)]:
            return seen | {f"{case}what you return": strange[0]}
        count = Counter(name for rank in reads for part, _ in rank for name in part)
        sizes = [[len(part) for part, _ in rank] for rank in reads]
        seen |= {
            f"{case}what you return": "lists of shards" if set(count) <= set(NAMES) else "other things",
            f"{case}shards that several ranks read": len(_shared([{s for part, _ in r for s in part} for r in reads])),
            f"{case}shards that are read more than once": sum(n > 1 for n in count.values()),
            f"{case}shards that each rank reads": [sum(rank) for rank in sizes],
            f"{case}shards that nobody reads": shards - len(count),
            f"{case}most shards of a worker over the fewest": max(max(rank) - min(rank) for rank in sizes) > 1,
            f"{case}workers with the same id read equally many": all(rank == sizes[0] for rank in sizes),
            f"{case}the same when asked again": all(part == again for rank in reads for part, again in rank),
        }
    return seen


def _reads(answer: Any, shards: Sequence[str], rank: int, ranks: int, workers: int) -> list[tuple[Any, Any]]:
    settings = {"multiprocessing_context": METHOD, "timeout": WAIT_S} if workers else {}
    data = Shards(answer, shards, rank, ranks)
    with any_number_of_workers():
        return _items(DataLoader(data, None, num_workers=workers, collate_fn=_as_it_is, **settings))


def _rest_dealt_out(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    worker = get_worker_info()
    return shards[rank::world_size] if worker is None else shards[rank::world_size][worker.id :: worker.num_workers]


def _worker_ignored(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    return shards[rank : len(shards) // world_size * world_size : world_size]


def _rank_ignored(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    worker = get_worker_info()
    return shards if worker is None else shards[worker.id :: worker.num_workers]


def _processes_numbered(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    worker = get_worker_info()
    workers, me = (1, 0) if worker is None else (worker.num_workers, worker.id)
    each = len(shards) // (world_size * workers)
    return shards[rank * workers + me : each * world_size * workers : world_size * workers]


EXERCISES = {
    "02.1": Exercise(
        "02.1",
        25,
        "make a loader for each rank and epoch",
        observe_rank_loader,
        rank_loader,
        (
            KnownMistake(
                "Your worker_init_fn can't be pickled, so workers start only by fork: not on macOS or Windows, and not "
                "by default from Python 3.14 on.",
                "Define it at the top of the cell or module, and give it rank, epoch and seed by functools.partial.",
                _closure,
            ),
            KnownMistake(
                "Both workers of a rank draw the same numbers: each has a copy of dataset.rng.",
                "A worker_init_fn runs in each worker. There, get_worker_info().dataset is the copy to change.",
                _copied_generator,
            ),
            KnownMistake(
                "Rank 1 draws the numbers of rank 0.",
                "The seed must depend on the rank as well: np.random.default_rng takes a list.",
                _same_on_every_rank,
            ),
            KnownMistake("Every epoch has the same order.", "Call sampler.set_epoch(epoch).", _same_order),
        ),
    ),
    "02.3": Exercise(
        "02.3",
        10,
        "say what limits a training run",
        observe_limits,
        limited_by,
        (
            KnownMistake(
                "You name the slower side even if both together are slower than either alone.",
                'Compare "together" with the slower side first.',
                _slower_side,
            ),
            KnownMistake(
                "You judge by the waiting alone.",
                "A model can wait for a tenth of its time and still be the slower side: compare rates.",
                _by_waiting,
            ),
            KnownMistake(
                "Without workers, one process loads and trains in turn.", "Look at num_workers first.", _without_turns
            ),
        ),
    ),
    "02.4": Exercise(
        "02.4",
        20,
        "give each worker of each rank its shards",
        observe_shards,
        my_shards,
        (
            KnownMistake(
                "A rank reads one shard more than another. With DDP, the run hangs at the end of the epoch.",
                "Use len(shards) // world_size shards for every rank, and leave the rest out.",
                _rest_dealt_out,
            ),
            KnownMistake(
                "All workers of a rank read the same shards.",
                "Divide the rank's shards among its workers: get_worker_info() knows id and num_workers.",
                _worker_ignored,
            ),
            KnownMistake("All ranks read the same shards.", "Divide the shards by rank first.", _rank_ignored),
            KnownMistake(
                "More shards than necessary are left out.",
                "Divide by ranks first. Workers of one rank may differ by a shard.",
                _processes_numbered,
            ),
        ),
    ),
}
