"""Saves that go to the scratch folder: whether there is room for them, and whether their price is that of its disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from labs.doctor.true_files import true
from labs.kit import _compat, host


class Room:
    """Of a scratch folder, looked at before each torch.save."""

    def __init__(self, scratch: Any) -> None:
        self.scratch, self._told = scratch, False

    def before_save(self, obj: Any, file: Any) -> None:
        """OSError if `obj` does not fit; tells once if the script saves to another disk than that of the folder."""
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(name, str | os.PathLike):
            return
        place = self.scratch.followed(self.scratch.place(name))
        if self.scratch.is_untouched(place):
            return
        need, free = nbytes(obj), self._free(place)
        if need > free:
            raise OSError(
                errno.ENOSPC,
                f"the doctor's scratch folder in {self._where()} has room for {free / 1e9:.3g} GB, and this save takes "
                f"{need / 1e9:.3g} GB: --let-it-write saves where the script wants it",
            )
        if not self._told and _device(place) != _device(self.scratch.folder):
            self._told = True
            self.scratch.tell(
                f"what saving costs on the script's own disk: its saves went to a scratch folder in {self._where()}, "
                f"another disk than that of {os.path.dirname(place)}, and the time of these is what is told: "
                "--let-it-write saves where the script wants it"
            )

    def _where(self) -> str:
        """The folder for temporary files, in which the run's own is."""
        return os.path.dirname(os.path.dirname(self.scratch.folder))

    def _free(self, place: str) -> int:
        """Bytes, with those of the file that is replaced; if it is kept in memory, no more than that has."""
        room = true.statvfs(self.scratch.folder)
        free = room.f_bavail * room.f_frsize
        if _is_memory(self.scratch.folder):
            free = min(free, host.container().memory_available_bytes)
        try:
            return free + true.stat(self.scratch.written + place).st_size
        except OSError:
            return free


def _device(path: str) -> int:
    """Number of the disk that holds it, or would."""
    while True:
        try:
            return true.stat(path).st_dev
        except OSError:
            path = os.path.dirname(path)


def _is_memory(folder: str) -> bool:
    """Whether it is a tmpfs, as Linux tells of each disk by its number; False where it does not."""
    device = _device(folder)
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with true.open_file("/proc/self/mountinfo") as mounts:
            return any(line.split()[2] == number and " - tmpfs " in line for line in mounts)
    except OSError:
        return False


def nbytes(obj: Any) -> int:
    """Of the tensors in dicts, lists, tuples and modules: torch.save writes each storage once, whole."""
    import torch

    sizes, left, seen = {}, [obj], set()
    while left:
        part = left.pop()
        if isinstance(part, torch.Tensor):
            local = part.to_local() if hasattr(part, "to_local") else part  # of FSDP2, this rank's part
            with suppress(NotImplementedError, RuntimeError):  # sparse, or it consists of others
                storage = local.untyped_storage()
                sizes[_compat.storage_key(storage)] = storage.nbytes() if storage.data_ptr() else 0
        elif id(part) not in seen and isinstance(part, list | tuple | Mapping | torch.nn.Module):
            seen.add(id(part))
            left += _inside(part)
    return sum(sizes.values())


def _inside(part: Any) -> list:
    """Without numbers and words: a history of losses may be long."""
    if hasattr(part, "parameters"):
        return [*part.parameters(), *part.buffers()]
    parts = part.values() if isinstance(part, Mapping) else part
    return [p for p in parts if not isinstance(p, int | float | str)]
