"""Ways to write a checkpoint, from what most scripts do to `save`, with how each is read back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from labs.common.checkpoints.files import Damaged, load_latest, save
from labs.kit import measure

NAME, CPU = "checkpoint.pt", torch.device("cpu")


def in_place(folder: Path, step: int, state: Any) -> None:
    """What most scripts do: the old checkpoint is gone before the new one is there."""
    torch.save(state, folder / NAME)


def renamed(folder: Path, step: int, state: Any) -> None:
    """Into a temporary file, then under its name: whole for every reader, as long as the machine stays up."""
    partial = folder / f"{NAME}.partial"
    torch.save(state, partial)
    os.replace(partial, folder / NAME)


def full(folder: Path, step: int, state: Any) -> None:
    """`labs.common.checkpoints.save`: a checksum, the last three kept, a lock, no leftovers."""
    save(folder, step, state)


class Found(NamedTuple):
    """What a program finds when it starts again: the state, or in one line why there is none."""

    state: Any
    why: str


def find(folder: Path) -> Found:
    """The one file of `in_place` and its kin."""
    try:
        return Found(torch.load(folder / NAME, weights_only=True), "")
    except Exception as e:  # torch has no kind of error of its own for this
        return Found(None, f"{type(e).__name__}: {' '.join(str(e).split())}")


def find_latest(folder: Path) -> Found:
    """The last good one of `save`."""
    try:
        found = load_latest(folder, on_damaged=lambda e: None)
    except Damaged as e:
        return Found(None, str(e))
    return Found(found[1], "") if found else Found(None, "no checkpoints")


class Way(NamedTuple):
    """How to write and how to read back."""

    write: Callable[[Path, int, Any], None]
    find: Callable[[Path], Found]


WAYS = {
    "in place": Way(in_place, find),
    "rename": Way(renamed, find),
    "full": Way(full, find_latest),
}


def save_seconds(folder: Path, state: Any, rounds: int | measure.Budget) -> list[float]:
    """Seconds of saves of `state` into `folder`, as `full` does it."""
    steps = itertools.count()
    save(folder, next(steps), state)
    return measure.interleave({"full": lambda: save(folder, next(steps), state)}, rounds, CPU)["full"]


def newest_bytes(folder: Path) -> int:
    """Size of the largest checkpoint in `folder`."""
    return max(p.stat().st_size for p in folder.glob("*.pt"))
