"""A worker with little shared memory: DataLoader workers send batches to the trainer through /dev/shm.

Without room, torch raises since October 2025 (https://github.com/pytorch/pytorch/pull/161910). Older versions take the
memory without checking, and the worker dies of a bus error. The place of the error depends on collate_fn. torch's
default makes the batch in shared memory, so the error travels like any other. Other batches are moved there by a thread
of the worker's queue, which prints the error and drops the batch, so the trainer waits.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


class SmallSharedMemory:
    """A worker_init_fn: limits the worker to `size` bytes of shared memory, and sends its output to the file `log`.

    With permission to mount, /dev/shm becomes a file system of that size, visible only to this worker. Without it, no
    file may be larger. Both imitate a full /dev/shm in a container (Docker's default is 64 MB).
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
    """Mount a small /dev/shm for this process only. OSError if this is not allowed."""
    new_mounts, new_users, private_all = 0x20000, 0x10000000, 0x44000  # CLONE_NEWNS, CLONE_NEWUSER, MS_REC | MS_PRIVATE
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    try:
        check(libc.unshare(new_mounts))
    except OSError:  # not root: become root of a new user namespace, if allowed
        uid, gid = os.getuid(), os.getgid()
        check(libc.unshare(new_mounts | new_users))
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    check(libc.mount(b"none", b"/", None, private_all, None))
    check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()))


def in_flight_bytes(workers: int, prefetch_factor: int, batch_bytes: int) -> int:
    """Return the most bytes of shared memory that batches take: all prefetched ones, one in transit and one in use."""
    return (workers * prefetch_factor + 2) * batch_bytes if workers else 0
