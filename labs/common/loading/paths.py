"""Paths of a data set, in four containers. Imports little, because spawned workers of labs.loader_memory import it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

NOTHING = "nothing"


def path(i: int) -> str:
    """Return a path as in a typical data set."""
    return f"/data/train/images/{i:012d}.jpeg"


class TensorOfPaths:
    """All paths in one byte tensor, with offsets that delimit path i. PyTorch moves both to shared memory."""

    def __init__(self, paths: Iterator[str]) -> None:
        encoded = [p.encode() for p in paths]
        self.bytes = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)
        self.offsets = torch.tensor([0, *map(len, encoded)]).cumsum(0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        return self.bytes[self.offsets[i] : self.offsets[i + 1]].numpy().tobytes()


BUILD: dict[str, Callable[[Iterator[str]], Any]] = {
    NOTHING: lambda paths: [],
    "list": list,
    "np.array of str": lambda paths: np.array(list(paths)),
    "np.array of bytes": lambda paths: np.array([p.encode() for p in paths]),  # dtype bytes: 1 byte per character
    "tensor and offsets": TensorOfPaths,
}


class Paths(Dataset):
    """Each item reads all paths and returns the worker's pid."""

    def __init__(self, held: str, paths: int) -> None:
        self.paths = BUILD[held](map(path, range(paths)))

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> int:
        for k in range(0, len(self.paths), 16 if isinstance(self.paths, TensorOfPaths) else 1):  # touches every page
            self.paths[k]
        give_back()
        return os.getpid()


def give_back() -> None:
    """Return freed memory to the system, such as pickling's."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
