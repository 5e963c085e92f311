"""What loading labs and the tuner share: an input pipeline driven batch by batch, and what it should reach."""

from __future__ import annotations

import itertools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader, Dataset

from labs.kit._compat import end_workers
from labs.kit.measure import sync
from labs.kit.rank import Rank, unpinned

Step = Callable[[Any], object]
WORKERS_ONLY = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


@dataclass(frozen=True)
class Feed:
    """Seconds of each timed step: waiting for its batch, and working on it; `batch` is the samples of one batch.

    Workers deliver in waves: with w workers, w batches arrive at about the same time. Single steps therefore say
    little (most of them do not wait at all), and every part of a run that is to be a sample holds whole waves.
    """

    wait_s: tuple[float, ...]
    work_s: tuple[float, ...]
    batch: int
    wave: int = 1
    """Batches that arrive together: the number of workers, at least 1."""

    def parts(self, most: int = 5) -> list[tuple[float, float]]:
        """(share of it that was spent waiting, samples per second) of each of up to `most` parts, in order of time."""
        length = max(1, math.ceil(len(self.wait_s) // self.wave / most)) * self.wave
        length = min(length, len(self.wait_s))  # a run that ended before its first wave did is one part
        found = []
        for start in range(0, len(self.wait_s) - length + 1, length) if length else ():
            wait, work = (sum(s[start : start + length]) for s in (self.wait_s, self.work_s))
            found.append((wait / (wait + work), self.batch * length / (wait + work)))
        return found

    @property
    def wait_share(self) -> tuple[float, ...]:
        """Share of the time that was spent waiting for data, in each of up to 5 parts of the run."""
        return tuple(share for share, _ in self.parts())

    def samples_per_s(self, most: int = 5) -> tuple[float, ...]:
        """Samples per second in each of up to `most` parts of the run."""
        return tuple(rate for _, rate in self.parts(most))


_END = object()


def drive(
    batches: Iterable[Any],
    step: Step | None,
    timed: int,
    device: torch.device,
    *,
    skip: int = 1,
    wave: int = 1,
    least_s: float = 0.0,
    deadline: float = math.inf,
) -> Feed:
    """Pull `skip` batches and then time `timed` of them, in whole waves and for at least `least_s` seconds.

    Each goes through `step`, after which the device is synchronised. What workers had ready before the clock started
    is free of charge: `skip` it (see `ready`). No batch is asked for after `deadline` (of time.perf_counter), so there
    may be fewer, or none. ValueError if the loader ends before.
    """
    turns = timed_batches(iter(batches), step, device, deadline)
    for _ in itertools.islice(turns, skip):
        pass
    sync(device)
    waits, works, batch, begun = [], [], None, time.perf_counter()
    while len(waits) < timed or len(waits) % wave or time.perf_counter() - begun < least_s:
        if (turn := next(turns, None)) is None:
            break
        wait, work, batch = turn
        waits.append(wait)
        works.append(work)
    return Feed(tuple(waits), tuple(works), rows(batch) if works else 0, wave)


def timed_batches(
    source: Iterator[Any], step: Step | None, device: torch.device, deadline: float
) -> Iterator[tuple[float, float, Any]]:
    """(seconds of waiting, seconds of work, batch) of each batch; `device` is synchronised after each step."""
    for done in itertools.count():
        start = time.perf_counter()
        if start >= deadline:
            return
        if (batch := next(source, _END)) is _END:
            raise ValueError(f"the loader ended after {done} batches, and more are needed: take a smaller batch")
        got = time.perf_counter()
        if step is not None:
            step(batch)
            sync(device)
        yield got - start, time.perf_counter() - got, batch


@contextmanager
def any_number_of_workers() -> Iterator[None]:
    """DataLoader warns of 4 workers on 2 cores, which is what is to be measured; both when made and when started."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@contextmanager
def running(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator of `loader` whose workers are gone afterwards, not only when the garbage collector finds it."""
    with any_number_of_workers():
        batches = iter(loader)
    try:
        yield batches
    finally:
        end_workers(batches)


def rows(batch: Any) -> int:
    """Number of samples in a batch: the length of its first tensor, however deep in lists, tuples and mappings.

    TypeError if it holds no tensor that has rows.
    """
    if isinstance(batch, torch.Tensor) and batch.dim():
        return len(batch)
    if isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            try:
                return rows(part)
            except TypeError:
                continue
    raise TypeError(f"a batch must hold a tensor, this one is of type {type(batch).__name__}")


class Forever(torch.utils.data.Sampler[int]):
    """Indices of a dataset of `size` in a shuffled order, epoch after epoch, without an end: timing needs no epochs."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(self.seed)
        while True:
            for some in torch.randperm(self.size, generator=order).split(4096):  # a list of all would take seconds
                yield from some.tolist()


class ByValue(Dataset):
    """A dataset whose class a notebook's cell defines, as workers can have it that are not forked.

    They are fresh processes on macOS, and everywhere from Python 3.14 on. Pickle would tell them to import the class
    from `__main__`, where it is not; cloudpickle sends the class along.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = dataset.__getitems__

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __reduce__(self) -> tuple:
        return _from_value, (cloudpickle.dumps(self.dataset),)


def _from_value(pickled: bytes) -> ByValue:
    return ByValue(cloudpickle.loads(pickled))


def endless(
    dataset: Dataset, workers: int, batch: int, order: Iterable[int] | None = None, **options: Any
) -> DataLoader:
    """A DataLoader that never runs out. `options` go to DataLoader; those that need workers are dropped without.

    The same samples come in the same `order` each time, from the cache of the system. An iterator in its place
    goes on from one loader to the next.
    """
    if workers == 0:
        options = {k: v for k, v in options.items() if k not in WORKERS_ONLY}
    sampler = Forever(len(dataset)) if order is None else order
    dataset = ByValue(dataset) if type(dataset).__module__ == "__main__" else dataset
    with any_number_of_workers():
        return DataLoader(dataset, batch, sampler=sampler, num_workers=workers, drop_last=True, **options)


def ready(workers: int, prefetch_factor: int = 2) -> int:
    """Batches that may be ready before the first is taken, and one more."""
    return workers * prefetch_factor + 1


def alone(batch: Any) -> Iterator[Any]:
    """The same batch for ever: a loader that costs nothing, so that the model is timed alone."""
    return itertools.repeat(batch)


def expected(model: float, loader: float, workers: int) -> float:
    """Samples per second of both together, from those of each alone.

    Without workers they take turns in one process, so their times add up: 1 / (1/model + 1/loader). With workers
    they overlap, and the slower one decides. Nobody takes anything from anybody in this formula.
    """
    return min(model, loader) if workers else 1 / (1 / model + 1 / loader)


@contextmanager
def on_cores(rank: Rank, cores: int) -> Iterator[None]:
    """Run on so many of the job's cores (0: all of them), as do workers started meanwhile; macOS has no such limit."""
    with unpinned(rank):
        before = getattr(os, "sched_getaffinity", lambda pid: set())(0)
        if cores and len(before) > cores:
            os.sched_setaffinity(0, sorted(before)[:cores])
        try:
            yield
        finally:
            if before:
                os.sched_setaffinity(0, before)
