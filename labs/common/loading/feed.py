"""Shared by the loading labs and the tuner: drive an input pipeline batch by batch, and predict its rate."""

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
    """Seconds of each timed step, waiting for its batch and working on it; `batch` is samples per batch.

    Workers deliver in waves: with w workers, w batches arrive at about the same time. Single steps therefore mean
    little (most don't wait at all), so each sample of a run must contain whole waves.
    """

    wait_s: tuple[float, ...]
    work_s: tuple[float, ...]
    batch: int
    wave: int = 1
    """Batches that arrive together: the number of workers, at least 1."""

    def parts(self, most: int = 5) -> list[tuple[float, float]]:
        """Return (share of time waiting, samples per second) of each of up to `most` parts, in order."""
        length = max(1, math.ceil(len(self.wait_s) // self.wave / most)) * self.wave
        length = min(length, len(self.wait_s))  # a run shorter than its first wave is one part
        found = []
        for start in range(0, len(self.wait_s) - length + 1, length) if length else ():
            wait, work = (sum(s[start : start + length]) for s in (self.wait_s, self.work_s))
            found.append((wait / (wait + work), self.batch * length / (wait + work)))
        return found

    @property
    def wait_share(self) -> tuple[float, ...]:
        """Share of time spent waiting for data, in each of up to 5 parts of the run."""
        return tuple(share for share, _ in self.parts())

    def samples_per_s(self, most: int = 5) -> tuple[float, ...]:
        """Return samples per second in each of up to `most` parts of the run."""
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
    """Pull `skip` batches, then time `timed` of them, in whole waves and for at least `least_s` seconds.

    Each batch goes through `step`, followed by a device synchronisation. Batches ready before the clock starts cost
    nothing, so `skip` them (see `ready`). Requests no batch after `deadline` (of time.perf_counter), so there may be
    fewer, or none. ValueError if the loader runs out.
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
    """Yield (seconds waiting, seconds working, batch) of each batch; synchronises `device` after each step."""
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
    """Silence DataLoader's warning about 4 workers on 2 cores, which comes both on creation and on start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@contextmanager
def running(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Yield an iterator of `loader`, and end its workers afterwards without waiting for the garbage collector."""
    with any_number_of_workers():
        batches = iter(loader)
    try:
        yield batches
    finally:
        end_workers(batches)


def rows(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor in nested lists, tuples and mappings.

    TypeError if it contains no tensor with rows.
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
    """Shuffled indices of a dataset of `size`, epoch after epoch without end: timing needs no epochs."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed

    def __iter__(self) -> Iterator[int]:
        order = torch.Generator().manual_seed(self.seed)
        while True:
            for some in torch.randperm(self.size, generator=order).split(4096):  # a list of all would take seconds
                yield from some.tolist()


class ByValue(Dataset):
    """A dataset whose class is defined in a notebook cell, for workers that aren't forked.

    Those are fresh processes: on macOS, and everywhere since Python 3.14. Pickle would import the class from
    `__main__`, where they don't have it; cloudpickle sends the class along.
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
    """Return a DataLoader that never runs out. `options` go to DataLoader; without workers, worker options are dropped.

    Each new loader gives the same samples in the same `order`, from the page cache. If `order` is an iterator, the next
    loader continues it.
    """
    if workers == 0:
        options = {k: v for k, v in options.items() if k not in WORKERS_ONLY}
    sampler = Forever(len(dataset)) if order is None else order
    dataset = ByValue(dataset) if type(dataset).__module__ == "__main__" else dataset
    with any_number_of_workers():
        return DataLoader(dataset, batch, sampler=sampler, num_workers=workers, drop_last=True, **options)


def ready(workers: int, prefetch_factor: int = 2) -> int:
    """Return how many batches may be ready before the first one is taken, plus one."""
    return workers * prefetch_factor + 1


def alone(batch: Any) -> Iterator[Any]:
    """Repeat the same batch forever, as a loader without cost, to time the model alone."""
    return itertools.repeat(batch)


def expected(model: float, loader: float, workers: int) -> float:
    """Predict samples per second of loader and model together from each one's rate alone.

    Without workers they take turns in one process, so their times add up: 1 / (1/model + 1/loader). With workers they
    overlap, and the slower one decides. The formula assumes that they don't compete for resources.
    """
    return min(model, loader) if workers else 1 / (1 / model + 1 / loader)


@contextmanager
def on_cores(rank: Rank, cores: int) -> Iterator[None]:
    """Run on this many of the job's cores (0: all), including workers started inside; no effect on macOS."""
    with unpinned(rank):
        before = getattr(os, "sched_getaffinity", lambda pid: set())(0)
        if cores and len(before) > cores:
            os.sched_setaffinity(0, sorted(before)[:cores])
        try:
            yield
        finally:
            if before:
                os.sched_setaffinity(0, before)
