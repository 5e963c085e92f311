"""What can happen to a checkpoint of many files: each damage is done to a copy of a good one."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from labs.sharded_checkpoint import sharded_model

METADATA = ".metadata"


def shard(folder: Path, rank: int = 0) -> Path:
    """The file that `rank` wrote with torch.distributed.checkpoint, one thread per rank."""
    return folder / f"__{rank}_0.distcp"


def missing(folder: Path, older: Path, tensor: Tensor) -> Path:
    """A rank's file is not there."""
    shard(folder).unlink()
    return shard(folder)


def truncated(folder: Path, older: Path, tensor: Tensor) -> Path:
    """The second half of a rank's file is not there."""
    os.truncate(shard(folder), shard(folder).stat().st_size // 2)
    return shard(folder)


def flipped(folder: Path, older: Path, tensor: Tensor) -> Path:
    """One bit in the middle of a tensor, which rank 0 holds as `tensor`, is not what it was."""
    data, values = bytearray(shard(folder).read_bytes()), tensor.detach().cpu().numpy().tobytes()
    data[data.index(values) + len(values) // 2] ^= 4
    shard(folder).write_bytes(data)
    return shard(folder)


def stale(folder: Path, older: Path, tensor: Tensor) -> Path:
    """A rank's file is that of an older save, as after a death while a folder was written a second time."""
    shutil.copyfile(shard(older), shard(folder))
    return shard(folder)


def no_metadata(folder: Path, older: Path, tensor: Tensor) -> Path:
    """The file that is written last is not there: the job was killed while it saved."""
    (folder / METADATA).unlink()
    return folder / METADATA


DAMAGES: dict[str, Callable[[Path, Path, Tensor], Path]] = {
    f.__name__: f for f in (missing, truncated, flipped, stale, no_metadata)
}
"""Each changes a checkpoint's folder, given the folder of an older save, and returns what it has changed."""


def plain_load(state: dict, folder: Path) -> None:
    """As DCP does it: into the tensors of `state`, in place."""
    dcp.load(state, checkpoint_id=folder)


def attempt(load: Callable, state: dict, folder: Path, expected: dict[str, Tensor]) -> tuple[str, bool]:
    """The error of `load(state, folder)` in one line, or "none"; and whether every tensor then is as expected."""
    try:
        with quiet():
            load(state, folder)
    except (Exception, CheckpointException) as e:  # DCP's is a BaseException: `except Exception` lets it pass
        return told(e), False
    return "none", all(torch.equal(expected[name], t) for name, t in sharded_model.whole(state).items())


def told(error: BaseException) -> str:
    """One line of what DCP raises, which holds a traceback of every rank; the same on all ranks."""
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Without DCP's warnings, which go to the root logger: a traceback, on every rank, for each thing that it tries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
