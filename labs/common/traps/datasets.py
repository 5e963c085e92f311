"""Small data sets that fill workers' memory, and a list of running workers."""

from __future__ import annotations

import contextlib
from multiprocessing import forkserver
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

Held = Literal["list of str", "NumPy array"]


class Items(Dataset):
    """`count` items; subclasses define an item."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class Objects(Items):
    """`objects` paths in a list or an array; each item reads one of `parts` parts of them.

    Item: the process's private bytes afterwards. Items 0 and 1 read nothing.
    """

    def __init__(self, parts: int, held: Held, objects: int) -> None:
        super().__init__(parts + 2)
        self.objects, self.step = objects, -(-objects // parts)
        paths = [f"/data/train/images/{i:012d}.jpeg" for i in range(objects)]
        self.values: Any = np.array(paths) if held == "NumPy array" else paths

    def __getitem__(self, item: int) -> int:
        for i in range((item - 2) * self.step, min((item - 1) * self.step, self.objects)):
            if i >= 0:
                self.values[i]
        return psutil.Process().memory_full_info().uss


class Blocks(Items):
    """Each item is `size` bytes, int8 (size,)."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count)
        self.size = size

    def __getitem__(self, item: int) -> Tensor:
        return torch.full((self.size,), item, dtype=torch.int8)


def workers_now() -> list[psutil.Process]:
    """Return living children of this process and of its fork server, without multiprocessing's helpers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            tracker = "resource_tracker" in " ".join(child.cmdline())
            server = child.pid == forkserver._forkserver._forkserver_pid
            if not (tracker or server) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
