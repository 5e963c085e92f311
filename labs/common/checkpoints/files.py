"""One file is one checkpoint: what torch.save writes, then a trailer that proves that it is whole.

    bytes of torch.save | magic, version, step, length of these bytes | SHA-256 of everything before it

torch.load, zipfile and other tools read such a file as they read any other of torch.save: they ignore the trailer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import secrets
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from labs.kit.errors import BadInput, require

MAGIC, VERSION, PARTIAL = b"gpu-ckpt", 1, ".partial"
FIELDS = struct.Struct("<8sIQQ")  # magic, version, step, bytes of torch.save
DIGEST_BYTES = hashlib.sha256().digest_size
TRAILER_BYTES = FIELDS.size + DIGEST_BYTES


class Damaged(BadInput):
    """A file that is no whole checkpoint. The message is one line that names the file and what is wrong with it."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path, self.problem = path, problem


def save(folder: str | os.PathLike, step: int, state: Any, keep: int = 3) -> Path:
    """Write `state` as the checkpoint of `step`, durably, then delete all but the last `keep` up to this step.

    Wherever the process dies in here, what was saved before is still there. Several writers wait for each other.
    `state` holds tensors, numbers, text, None, and dicts, lists and tuples of them (`training_state` makes one).

    Raises:
        OSError: no room, no right; nothing is lost and no half file is left.
        BadInput: torch.load(weights_only=True) would refuse something in `state`.
    """
    require(keep >= 1, f"keep must be at least 1, not {keep}")
    require(0 <= step < 10**8, f"step must be from 0 to 99999999, not {step}")
    path = Path(folder) / f"step-{step:08}.pt"
    _make(path.parent)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with _alone_in(path.parent) as directory:
        try:
            with partial.open("xb") as file:
                write(file, step, state)
                file.flush()
                os.fsync(file.fileno())  # the bytes are on the disk before the name leads to them
            _require_plain(partial)
            os.replace(partial, path)  # a reader sees the old file or the new one, never half of one
            os.fsync(directory)  # the name is on the disk before anything older goes
        except BaseException as e:
            partial.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise OSError(e.errno, f"{e.strerror}; step {step} is not saved, earlier ones are", str(path)) from e
            raise
        for old in [p for p in checkpoints(path.parent) if p.name <= path.name and p.is_file()][:-keep]:
            old.unlink(missing_ok=True)  # where nothing can be locked, another writer may have been faster
    return path


def tell(damaged: Damaged) -> None:
    """One line on stderr."""
    print(f"skipped: {damaged}", file=sys.stderr)


def load_latest(folder: str | os.PathLike, on_damaged: Callable[[Damaged], object] = tell) -> tuple[int, Any] | None:
    """(step, state) of the last good checkpoint; None if there are no checkpoints at all. Tensors are on the CPU.

    Every damaged file on the way is told to `on_damaged` and skipped. Damaged is raised if none is good: to start
    again from nothing is not for a program to decide.
    """
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return load(path)
        except Damaged as e:
            on_damaged(e)
    if paths:
        raise Damaged(Path(folder), f"holds no good checkpoint: all {len(paths)} are damaged")
    return None


def load(path: str | os.PathLike) -> tuple[int, Any]:
    """(step, state) of one checkpoint, its tensors on the CPU. Damaged if a single bit is not as it was written."""
    path = Path(path)
    with opened(path) as file:  # one open file: what is checked is what is loaded, whatever is renamed meanwhile
        step = check(file, path)
        file.seek(0)
        try:
            return step, torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as e:
            raise Damaged(path, f"is as it was written, but torch refuses it: {' '.join(str(e).split())[:200]}") from e


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """What is named as a checkpoint in `folder`, by step, whole or not. OSError if the folder cannot be read."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = {step: Path(folder) / name for name in names if (step := step_of(name)) is not None}
    return [found[step] for step in sorted(found)]


def step_of(name: str) -> int | None:
    """The step that a file's name tells; None for a name that `save` does not give."""
    named = re.fullmatch(r"step-(\d{8})\.pt", name)
    return int(named[1]) if named else None


def write(file: BinaryIO, step: int, state: Any) -> None:
    """Write `state` and the trailer to an open file, hashed on its way: the state is not held in memory twice."""
    hashed = _Hashed(file)
    try:
        torch.save(state, hashed)
    except RuntimeError as e:  # what torch makes of a failed write does not say why it failed
        raise (hashed.error or e) from None
    hashed.write(FIELDS.pack(MAGIC, VERSION, step, hashed.length))
    file.write(hashed.sha256.digest())


def check(file: BinaryIO, path: Path) -> int:
    """The step of an open checkpoint, after every byte was compared with its trailer. Raises Damaged."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TRAILER_BYTES))
    trailer = file.read()
    if not size:
        raise Damaged(path, "is empty")
    if len(trailer) < TRAILER_BYTES or not trailer.startswith(MAGIC):
        raise Damaged(path, "does not end as a checkpoint does: it was cut off, or is another kind of file")
    _, version, step, length = FIELDS.unpack_from(trailer)
    if version != VERSION:
        raise Damaged(path, f"has format version {version}, this program reads version {VERSION}")
    if length != size - TRAILER_BYTES:
        raise Damaged(path, f"holds {size - TRAILER_BYTES} bytes of state, {length} were written")
    if _sha256(file, size - DIGEST_BYTES) != trailer[-DIGEST_BYTES:]:
        raise Damaged(path, "is not as it was written: its SHA-256 has changed")
    if step_of(path.name) not in (None, step):
        raise Damaged(path, f"holds step {step}: it was renamed or swapped")
    return step


class _Hashed:
    """A file to write to, which keeps the number and the SHA-256 of the bytes, and the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.length, self.sha256, self.error = file, 0, hashlib.sha256(), None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as e:
            self.error = e
            raise
        self.sha256.update(data)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _sha256(file: BinaryIO, size: int) -> bytes:
    """Of the first `size` bytes, a mebibyte at a time."""
    digest = hashlib.sha256()
    file.seek(0)
    while size and (chunk := file.read(min(size, 2**20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def _require_plain(path: Path) -> None:
    """BadInput if the file holds what it could not be loaded with: better now than when it is needed."""
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        kinds = ", ".join(sorted(refused))
        raise BadInput(f"a checkpoint holds tensors, numbers, text, lists and dicts only, this state holds {kinds}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """`path` open for reading. Damaged if it is a folder, a pipe, or cannot be read."""
    try:
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise Damaged(path, "is a folder" if path.is_dir() else "is not a file")
        with path.open("rb") as file:
            yield file
    except OSError as e:
        raise Damaged(path, f"cannot be read ({e.strerror or e})") from e


def _make(folder: Path) -> None:
    """Make `folder`, and bring the names of all folders that are made to the disk: what is in them hangs on these."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in reversed(made):
        fsync_folder(place.parent)


def fsync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk. OSError where it cannot be."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """A file descriptor of `folder`, locked: the system releases the lock when this process dies, however it dies.

    Who holds the lock knows that every partial file is of a dead writer. Some network file systems cannot lock a
    folder; partial files then stay, and their random names keep two writers apart.
    """
    directory = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_EX)
            for leftover in folder.glob(f"step-*{PARTIAL}"):
                leftover.unlink(missing_ok=True)
        yield directory
    finally:
        with suppress(OSError):
            fcntl.flock(directory, fcntl.LOCK_UN)  # closing is not enough if a process was forked meanwhile
        os.close(directory)
