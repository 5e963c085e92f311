"""What the system keeps in memory: files that were read, and the pages that belong to one process alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def flush(paths: Iterable[Path]) -> None:
    """Write to the disk what these files still have in memory only: such pages cannot be evicted."""
    for path in paths:
        with _opened(path) as file:
            os.fsync(file)  # milliseconds each, whether there is something to write or not


def evict(paths: Iterable[Path]) -> None:
    """Ask the system to drop these files from its page cache. Pages that are unwritten or mapped stay."""
    for path in paths:
        with _opened(path) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def is_cached(path: Path, offset: int = 0) -> bool:
    """Whether the byte at `offset` is in the page cache: a read that must not wait gets it or fails.

    A read that fails makes the system fetch the page all the same: ask once, and evict again.
    """
    with _opened(path) as file:
        try:
            return os.preadv(file, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def can_evict(path: Path) -> bool:
    """Whether files beside this one really leave the page cache when asked to: Linux on a disk, not tmpfs or macOS.

    A virtual machine's disk may still be in the memory of its host.
    """
    if not (hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")):
        return False
    try:
        flush([path])
        path.read_bytes()
        was_cached = is_cached(path)
        evict([path])
        return was_cached and not is_cached(path)
    except OSError:  # a file system without such reads
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def private_bytes(pid: int) -> int:
    """Bytes of memory that would be free again if this process ended: its own pages, neither shared nor of files.

    On Linux its dirty private pages; elsewhere its unique set size, which also counts files that only it maps.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.exists():
        return psutil.Process(pid).memory_full_info().uss
    lines = dict(line.split(":", 1) for line in rollup.read_text().splitlines()[1:])
    return int(lines["Private_Dirty"].split()[0]) * 1024
