"""Small map-style datasets that show what DataLoader workers are, and a guard that no worker outlives a trap."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

Held = Literal["list of str", "list of int", "NumPy array", "torch tensor"]
Failure = Literal["raises", "unreadable_jpeg", "killed", "exits", "exits_with_0", "hangs"]


class Items(Dataset):
    """`count` items; what an item is, subclasses say."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class Processes(Items):
    """Item: int64 (5,), of the process that reads it: pid, whether it comes from the one that made this data set (0 or
    1), threads, private and resident bytes. It may come by way of a fork server, as from Python 3.14 on."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.maker = os.getpid()

    def __getitem__(self, item: int) -> Tensor:
        me = psutil.Process()
        memory = me.memory_full_info()
        comes_from_it = self.maker in (p.pid for p in me.parents())
        return torch.tensor([me.pid, comes_from_it, me.num_threads(), memory.uss, memory.rss])


class Draws(Items):
    """Item: a float64 drawn with `draw(dataset)`, as an augmentation does. `rng` was made when the dataset was."""

    def __init__(self, count: int, draw: Callable[[Draws], float], seed: int) -> None:
        super().__init__(count)
        self.draw, self.rng = draw, np.random.default_rng(seed)
        self.own: np.random.Generator | None = None

    def __getitem__(self, item: int) -> Tensor:
        return torch.tensor(self.draw(self), dtype=torch.float64)


def from_numpy(dataset: Draws) -> float:
    """From NumPy's global state: since 1.9 torch seeds it in each worker, newly for each epoch."""
    return float(np.random.random())


def from_random(dataset: Draws) -> float:
    """From Python's global state, which torch seeds in each worker too."""
    return random.random()


def from_torch(dataset: Draws) -> float:
    """From torch's global state: base seed of the epoch + worker id."""
    return float(torch.rand((), dtype=torch.float64))


def from_held_generator(dataset: Draws) -> float:
    """From the generator that the dataset holds: each worker starts with a copy of it, in each epoch."""
    return float(dataset.rng.random())


def from_own_generator(dataset: Draws) -> float:
    """From a generator that each worker makes for itself, from the seed that torch gave it."""
    if dataset.own is None:
        dataset.own = np.random.default_rng(torch.initial_seed())
    return float(dataset.own.random())


class Objects(Items):
    """The same `objects` texts or numbers, held in one of four ways; each item reads one of `parts` parts of them.

    Item: private bytes of the process after that. Items 0 and 1 read nothing.
    """

    def __init__(self, parts: int, held: Held, objects: int) -> None:
        super().__init__(parts + 2)
        self.objects, self.step = objects, -(-objects // parts)
        texts = held in ("list of str", "NumPy array")
        values: Any = [object_text(i) for i in range(objects)] if texts else list(range(2**40, 2**40 + objects))
        self.values = {"NumPy array": np.array, "torch tensor": torch.tensor}.get(held, list)(values)

    def __getitem__(self, item: int) -> int:
        for i in range((item - 2) * self.step, min((item - 1) * self.step, self.objects)):
            if i >= 0:
                self.values[i]
        return psutil.Process().memory_full_info().uss


def object_text(i: int) -> str:
    """A path as datasets hold them, 36 ASCII characters."""
    return f"/data/train/images/{i:012d}.jpeg"


class Source(Items):
    """Item: its number, after `item_s` of sleep (a disk, a network) or of hashing `size` bytes (decoding)."""

    def __init__(self, count: int, item_s: float, size: int = 0) -> None:
        super().__init__(count)
        self.item_s, self.data = item_s, bytes(size)

    def __getitem__(self, item: int) -> int:
        if self.data:
            hashlib.sha256(self.data)
        else:
            time.sleep(self.item_s)
        return item


class Fails(Items):
    """Item `bad` fails in one way, the others are read: as a picture where there are `paths`."""

    def __init__(self, count: int, how: Failure, bad: int, hang_s: float, paths: Sequence[Path] = ()) -> None:
        super().__init__(count)
        self.how, self.bad, self.hang_s, self.paths = how, bad, hang_s, paths

    def __getitem__(self, item: int) -> Tensor:
        if self.how == "unreadable_jpeg":
            return self._picture(self.paths[item])
        if item == self.bad:
            self._fail()
        return torch.zeros(4)

    def _picture(self, path: Path) -> Tensor:
        from PIL import Image

        with path.open("rb") as file:
            return torch.from_numpy(np.array(Image.open(file).convert("RGB")))

    def _fail(self) -> None:
        if self.how == "raises":
            raise ValueError("label 12 is not below 10")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
        if self.how.startswith("exits"):
            os._exit(0 if self.how == "exits_with_0" else 3)
        time.sleep(self.hang_s)


class Blocks(Items):
    """Item: `size` bytes, as int8 (size,)."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count)
        self.size = size

    def __getitem__(self, item: int) -> Tensor:
        return torch.full((self.size,), item, dtype=torch.int8)


def seed_alike(worker: int) -> None:
    """A worker_init_fn that undoes what torch did: the same numbers in all workers and epochs."""
    np.random.seed(0)


def seed_by_id(worker: int) -> None:
    """The cure of many answers on the web: workers differ, epochs do not."""
    np.random.seed(worker)


def replace_generator(worker: int) -> None:
    """A worker_init_fn for datasets that hold a generator. `info.seed` is new for each worker and epoch."""
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def print_to(log: Path, worker: int) -> None:
    """A worker_init_fn, once `log` is given: what the worker prints as an error goes to this file.

    A worker that fails, or whose neighbour fails, may print a traceback of a thread of multiprocessing.
    """
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.close(file)


def last_line(log: Path) -> str:
    """The last line of `log`; "" if nothing was printed."""
    lines = log.read_text().strip().splitlines() if log.exists() else []
    return lines[-1] if lines else ""


def workers_now() -> list[psutil.Process]:
    """Living children of this process and of its fork server, without these helpers of multiprocessing."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            tracker = "resource_tracker" in " ".join(child.cmdline())
            server = child.pid == forkserver._forkserver._forkserver_pid
            if not (tracker or server) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@contextmanager
def no_worker_left() -> Iterator[None]:
    """End what a trap leaves: its workers, and then the iterators that only the garbage collector can find.

    It rests meanwhile: it would end these workers at a time of its own, and stop us for 5 s each.
    """
    before, was_on = workers_now(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if left := [w for w in workers_now() if w not in before]:
            _kill(left)
            gc.collect()
        if was_on:
            gc.enable()


def _kill(workers: list[psutil.Process]) -> None:
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess, RuntimeError):  # torch raises when a worker is killed
            worker.kill()
    for _ in range(50):
        with contextlib.suppress(RuntimeError):
            workers = psutil.wait_procs(workers, timeout=0.1)[1]
        if not workers:
            break
