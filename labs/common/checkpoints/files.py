"""One file per checkpoint: what torch.save writes, then a trailer that proves that the file is intact.

    bytes of torch.save | magic, version, step, length of these bytes | SHA-256 of everything before it

torch.load, zipfile and other tools read such a file as usual, because they ignore the trailer.
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
    """A file isn't an intact checkpoint. The message is one line that names the file and the problem."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path, self.problem = path, problem


def save(folder: str | os.PathLike, step: int, state: Any, keep: int = 3) -> Path:
    """Write `state` durably as the checkpoint of `step`, then delete all but the last `keep` up to this step.

    Wherever the process dies in here, the last complete checkpoint survives. Concurrent writers wait for each other.
    `state` holds tensors, numbers, strings, None, and dicts, lists and tuples of them, as from `training_state`.

    Raises:
        OSError: no space or no permission; nothing is lost and no partial file is left.
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
                os.fsync(file.fileno())  # the bytes reach the disk before the name points to them
            _require_plain(partial)
            os.replace(partial, path)  # a reader sees the old file or the new one, never half of one
            os.fsync(directory)  # the name reaches the disk before older files are deleted
        except BaseException as e:
            partial.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise OSError(e.errno, f"{e.strerror}; step {step} is not saved, earlier ones are", str(path)) from e
            raise
        for old in [p for p in checkpoints(path.parent) if p.name <= path.name and p.is_file()][:-keep]:
            old.unlink(missing_ok=True)  # without locks, another writer may have deleted it
    return path


def tell(damaged: Damaged) -> None:
    """Print one line to stderr."""
    print(f"skipped: {damaged}", file=sys.stderr)


def load_latest(folder: str | os.PathLike, on_damaged: Callable[[Damaged], object] = tell) -> tuple[int, Any] | None:
    """Return (step, state) of the last good checkpoint, with tensors on the CPU; None if there are no checkpoints.

    Passes each damaged file on the way to `on_damaged` and skips it. Raises Damaged if none is good, because a program
    shouldn't decide to start over.
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
    """Return (step, state) of one checkpoint, with tensors on the CPU. Damaged if a single bit has changed."""
    path = Path(path)
    with opened(path) as file:  # opened once: what is checked is what is loaded, even if the file is replaced
        step = check(file, path)
        file.seek(0)
        try:
            return step, torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as e:
            raise Damaged(path, f"is as it was written, but torch refuses it: {' '.join(str(e).split())[:200]}") from e


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Return the files named as checkpoints, intact or not, by step; [] without the folder. OSError if unreadable."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = {step: Path(folder) / name for name in names if (step := step_of(name)) is not None}
    return [found[step] for step in sorted(found)]


def step_of(name: str) -> int | None:
    """Return the step in a file's name; None if it isn't a name that `save` gives."""
    named = re.fullmatch(r"step-(\d{8})\.pt", name)
    return int(named[1]) if named else None


def write(file: BinaryIO, step: int, state: Any) -> None:
    """Write `state` and the trailer to an open file, hashing as it writes, so the state isn't in memory twice."""
    hashed = _Hashed(file)
    try:
        torch.save(state, hashed)
    except RuntimeError as e:  # torch's own error doesn't say why the write failed
        raise (hashed.error or e) from None
    hashed.write(FIELDS.pack(MAGIC, VERSION, step, hashed.length))
    file.write(hashed.sha256.digest())


def check(file: BinaryIO, path: Path) -> int:
    """Check every byte of an open checkpoint against its trailer, and return its step. Raises Damaged."""
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
    """A writable file that tracks the number and SHA-256 of its bytes, and the error of a failed write."""

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
    """Return the SHA-256 of the first `size` bytes, read 1 MiB at a time."""
    digest = hashlib.sha256()
    file.seek(0)
    while size and (chunk := file.read(min(size, 2**20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def _require_plain(path: Path) -> None:
    """Raise BadInput if torch.load would refuse the file, now rather than when it is needed."""
    if refused := torch.serialization.get_unsafe_globals_in_checkpoint(path):
        kinds = ", ".join(sorted(refused))
        raise BadInput(f"a checkpoint holds tensors, numbers, text, lists and dicts only, this state holds {kinds}")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading. Damaged if it is a folder or a pipe, or can't be read."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would block forever
            raise Damaged(path, "is a folder" if path.is_dir() else "is not a file")
        with path.open("rb") as file:
            yield file
    except OSError as e:
        raise Damaged(path, f"cannot be read ({e.strerror or e})") from e


def _make(folder: Path) -> None:
    """Make `folder` and missing parents, and flush their names to the disk, so that a power cut can't lose them."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in reversed(made):
        fsync_folder(place.parent)


def fsync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk. OSError if that fails."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _alone_in(folder: Path) -> Iterator[int]:
    """Lock `folder` and yield its file descriptor. The system releases the lock however this process dies.

    While we hold the lock, every partial file is a dead writer's, so we remove it. Some network file systems can't lock
    a folder; partial files then stay, and their random names keep two writers apart.
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
            fcntl.flock(directory, fcntl.LOCK_UN)  # closing isn't enough if a process was forked in the meantime
        os.close(directory)
