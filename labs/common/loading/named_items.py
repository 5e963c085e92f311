"""Errors of a DataLoader that name the item that was being read, and workers that end with the error.

    dataset = NamedItems(dataset)
    with dataset.named():
        for batch in DataLoader(dataset, num_workers=4, timeout=60):
            ...

torch says which process died, not which item killed it: each worker therefore notes in shared memory what it reads.
And it keeps the workers of a loader that raised alive until the garbage collector finds its iterator, and ending them
then takes 5 s each (torch 2.13: by then the queues that would tell them are closed): here they end at once.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import queues
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

IDLE = -1


class ItemFailed(RuntimeError):
    """Reading an item of a dataset failed. The message names the item."""


class NamedItems(Dataset):
    """A map-style dataset whose failures name the item: by its number, and by what `name` says of it.

    `name` defaults to the entry of `dataset.paths`, where there is one. One loader at a time; at most `workers`
    workers. Reading an item costs some microseconds more.
    """

    def __init__(self, dataset: Any, name: Callable[[int], object] | None = None, *, workers: int = 256) -> None:
        self.dataset, self._name = dataset, name
        # (pid, item) of the trainer itself, then of each worker
        self._reading = torch.full((workers + 1, 2), IDLE, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> Any:
        worker = get_worker_info()
        mine = self._reading[worker.id + 1 if worker else 0]
        mine[0], mine[1] = os.getpid(), item
        try:
            return self.dataset[item]
        except Exception as e:
            if isinstance(e, IndexError) and item >= len(self):  # how Python ends `for x in dataset`
                raise
            raise ItemFailed(f"{self.describe(item)}: {type(e).__name__}: {e}") from e
        finally:
            mine[1] = IDLE  # not reached by a worker that dies

    def describe(self, item: int) -> str:
        """For example "item 5 (photos/broken.jpg)"."""
        paths = getattr(self.dataset, "paths", None)
        name = self._name(item) if self._name else paths[item] if paths else ""
        return f"item {item} ({name})" if str(name) else f"item {item}"

    def being_read(self) -> dict[int, str]:
        """What each process is reading now, or read when it died: {pid: description}."""
        return {pid: self.describe(item) for pid, item in self._reading.tolist() if item != IDLE}

    @contextmanager
    def named(self) -> Iterator[None]:
        """Around loops over loaders of this dataset: ItemFailed if an item raises, or if a worker dies or hangs.

        All errors end the workers, unless the loader is persistent or its iterator has a name of its own. The
        traceback stays, but its frames lose their variables.
        """
        self._reading.fill_(IDLE)
        try:
            yield
        except BaseException as e:
            reading, words = self.being_read(), "" if isinstance(e, ItemFailed) else loader_error(e)
            end_workers(e)
            if not words:
                raise
            raise ItemFailed(f"{words.rstrip('. ')}: {_doing(words, reading)}") from e


def _doing(words: str, reading: dict[int, str]) -> str:
    """What the processes that `words` name were reading; all of them, where torch names none (a timeout)."""
    named = set(map(int, re.findall(r"\d+", words))) if "pid" in words else set(reading)
    items = [f"process {pid} was reading {item}" for pid, item in reading.items() if pid in named]
    return "; ".join(items) or "no item was being read, see what the workers printed"


def end_workers(error: BaseException) -> None:
    """Let go of the loader iterators that the tracebacks of `error` keep alive: their workers end."""
    release_queues(error)
    for seen in _chain(error):
        traceback.clear_frames(seen.__traceback__)


def release_queues(error: BaseException) -> None:
    """Make queues usable again that were being written to when `error` came.

    torch raises from its handler of SIGCHLD when a worker dies, wherever the trainer is. If that is within
    `Queue.put`, just after it took the queue's lock, the lock stays taken, and torch waits for it for ever when it
    ends the other workers (seen about once in 50 runs that kill workers on a busy machine; torch 2.13, Python 3.11).
    The error has left `put`, so no one needs the lock but the queue's own thread, which holds it for microseconds.
    """
    for seen in _chain(error):
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            if frame.f_code is queues.Queue.put.__code__ and "self" in frame.f_locals:  # not cleared yet
                lock = frame.f_locals["self"]._notempty
                lock.acquire(timeout=1)  # in vain if it stayed taken
                lock.release()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def loader_error(error: BaseException) -> str:
    """torch's words, if `error` says that a worker died or took too long, otherwise nothing.

    The signal or exit code is in the cause. A connection that breaks is the first sign of a worker that dies while
    its batch is on its way; why it died torch raises moments later, from its handler of SIGCHLD.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader"):
        cause = str(error.__cause__ or "")
        return cause if cause.startswith("DataLoader worker") else str(error)
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, ConnectionError | EOFError) or "_try_get_data" not in frames:
        return ""
    try:
        time.sleep(0.5)
    except RuntimeError as death:
        return str(death)
    return f"DataLoader worker closed its connection ({type(error).__name__})"
