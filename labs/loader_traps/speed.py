"""What DataLoader workers cost and bring: processes, memory, the wait for the first batch, items per second."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing import forkserver

import torch
from torch.utils.data import DataLoader

from labs.common.traps.datasets import Held, Objects, Processes, Source
from labs.kit import measure

READINGS = 20
"""Parts in which the objects of a dataset are read, with a look at the memory after each."""


def processes(workers: int, items: int) -> list[list[int]]:
    """Of the process that read each of `items`: pid, whether this one has started it, threads, private and resident
    bytes."""
    loader = DataLoader(Processes(items), batch_size=1, num_workers=workers)
    return [batch[0].tolist() for batch in loader]


def private_bytes(held: Held, objects: int) -> list[float]:
    """Private bytes of a forked worker that reads all objects once: before, and after each of READINGS parts."""
    dataset = Objects(READINGS, held, objects)
    seen = list(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    return [float(b) for b in seen[1:]]  # what the worker needs for its first look is not about the objects


def copied_bytes(objects: int, object_bytes: int) -> int:
    """Bytes that a forked worker must copy since reading an object counts a reference, which is in the object.

    Memory is handed out in steps of 16 bytes; without the page tables and what the allocator adds.
    """
    return objects * -(-object_bytes // 16) * 16


def first_batches(workers: int, start_method: str, persistent: bool, epochs: int = 3) -> list[float]:
    """Seconds until the first batch of each epoch is there; the batch itself takes some 2 ms."""
    options = {"multiprocessing_context": start_method, "persistent_workers": persistent} if workers else {}
    loader, seconds = DataLoader(Source(8, 1e-3), batch_size=2, num_workers=workers, **options), []
    for _ in range(epochs):
        start, iterator = time.perf_counter(), iter(loader)
        next(iterator)
        seconds.append(time.perf_counter() - start)
        for _ in iterator:  # to the end: a persistent loader cannot start anew before
            pass
    return seconds


@contextlib.contextmanager
def own_fork_server() -> Iterator[None]:
    """A fork server that has torch loaded before it is asked for workers; ended afterwards.

    Without the preload each worker would import torch for itself, as with spawn.
    """
    multiprocessing.set_forkserver_preload(["torch.utils.data", Source.__module__])
    try:
        yield
    finally:
        forkserver._forkserver._stop()


def bytes_for(item_s: float) -> int:
    """How many bytes one core hashes in `item_s`."""
    data = bytes(2**18)
    seconds = measure.time_steps(lambda: hashlib.sha256(data), 20, torch.device("cpu"))
    return max(1, int(len(data) * item_s / sorted(seconds)[len(seconds) // 2]))


def items_per_s(sources: Mapping[int, Source], batch_size: int, rounds: int | measure.Budget) -> dict[int, list[float]]:
    """Items per second of whole epochs by number of workers, one per round, in turn. Workers are up before."""
    loaders = {
        n: DataLoader(source, batch_size=batch_size, num_workers=n, persistent_workers=n > 0)
        for n, source in sources.items()
    }
    steps = {str(n): partial(deque, loader, maxlen=0) for n, loader in loaders.items()}
    for step in steps.values():
        step()
    seconds = measure.interleave(steps, rounds, torch.device("cpu"))
    return {n: [len(source) / s for s in seconds[str(n)]] for n, source in sources.items()}
