"""A worker with little shared memory: batches travel from DataLoader workers to the trainer through /dev/shm.

When there is no room, torch raises since October 2025 (https://github.com/pytorch/pytorch/pull/161910). Older versions
take the memory without asking whether it is there, and the worker dies of a bus error. Where the error is raised
depends on collate_fn: torch's own makes the batch in shared memory, so the error travels as any other. Other batches
are moved there by a thread of the worker's queue, which prints the error and drops the batch: the trainer waits.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


class SmallSharedMemory:
    """worker_init_fn: leaves the worker `size` bytes of shared memory, and sends what it prints to the file `log`.

    With the right to mount, /dev/shm becomes a file system of that size that only this worker sees. Without it, no
    file may be larger. Both are as when a container's /dev/shm is full (64 MB, where Docker is not told otherwise).
    """

    def __init__(self, size: int, log: Path) -> None:
        self.size, self.log = size, log
        self._mounted = torch.zeros(1).share_memory_()

    @property
    def how(self) -> str:
        """What the worker was able to do."""
        return "private /dev/shm" if self._mounted.item() else "limit of the file size"

    def __call__(self, worker: int) -> None:
        import resource

        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 2)
        os.close(file)
        try:
            _mount_small_shm(self.size)
            self._mounted.fill_(1)
        except OSError:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


def _mount_small_shm(size: int) -> None:
    """OSError if this is not allowed. Nothing outside of this process changes."""
    new_mounts, new_users, private_all = 0x20000, 0x10000000, 0x44000  # CLONE_NEWNS, CLONE_NEWUSER, MS_REC | MS_PRIVATE
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    try:
        check(libc.unshare(new_mounts))
    except OSError:  # not root: root of a name space of its own, where that is allowed
        uid, gid = os.getuid(), os.getgid()
        check(libc.unshare(new_mounts | new_users))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    check(libc.mount(b"none", b"/", None, private_all, None))
    check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()))


def in_flight_bytes(workers: int, prefetch_factor: int, batch_bytes: int) -> int:
    """Most bytes of shared memory that batches take: all prefetched ones, one handed over and one in use."""
    return (workers * prefetch_factor + 2) * batch_bytes if workers else 0
