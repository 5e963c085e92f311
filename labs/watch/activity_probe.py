"""Does this process make progress? A thread beside it asks about once per second.

A training run that hangs does nothing at all, while a slow one does something: it computes, reads or writes, or its
workers do. No single sign fits all programs, so any one of them counts. Imports no torch.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import process as multiprocess
from pathlib import Path
from types import FrameType
from typing import Any

from labs.kit import _compat

BUSY = 0.1
"""Share of a core above which a process computes; a thread that logs, or asks a store now and then, takes less."""
BYTES_PER_S = 65_536
"""Rate above which a process reads or writes; this probe and a logger stay below it."""
SWITCHES_PER_S = 1.0
"""Rate at which a busy loader worker sleeps and wakes; an idle one wakes every 5 s."""
TCP_BYTES = (120, 136)  # of bytes_acked and bytes_received in struct tcp_info, linux/tcp.h
DEEPEST = 500  # frames of a stack that are looked at


class ActivityProbe:
    """`look()` names the sign of progress since the last look, or returns ""."""

    def __init__(self) -> None:
        self.main = threading.main_thread()
        self.counts = Counts()
        self.counted: Any = None
        self.known_stacks: set[tuple] = set()
        self.samples: dict[str, tuple[float, Any]] = {}

    def look(self) -> str:
        """One sign is enough, and the cheap ones come first; a sign that was not read starts again."""
        signs: dict[str, Callable[[], bool]] = {
            "steps": self._counts_changed,
            "stack": self._stack_is_new,
            "computing": self._computes,
            "input or output": self._reads_or_writes,
            "disk": self._waits_for_disk,
            "processes": self._processes_work,
        }
        for name, sign in signs.items():
            with suppress(OSError):  # a process or a file that has gone meanwhile
                if sign():
                    return name
        return ""

    def _counts_changed(self) -> bool:
        """Collectives, optimizer steps, batches."""
        before, self.counted = self.counted, self.counts.now()
        if before == self.counted:
            return False
        self.known_stacks.clear()
        return True

    def _stack_is_new(self) -> bool:
        """Whether the main thread is at a place that is new since the last progress.

        Another place is not enough: a loop that waits moves between a few places for ever.
        """
        stack = positions(sys._current_frames().get(self.main.ident or 0))
        new = stack not in self.known_stacks
        self.known_stacks.add(stack)
        return new

    def _computes(self) -> bool:
        """All threads but this one; together with the time for which the main thread could run and no core was free.

        A host that waits for NCCL spins, which is no work: then only a new stack counts.
        """
        busy = time.process_time() - time.thread_time() + _waited_for_a_core(os.getpid())
        share = self._rate("computing", busy)
        return share >= BUSY and not self.counts.nccl_is_under_way()

    def _reads_or_writes(self) -> bool:
        """Files by the kernel's count for this process, sockets by TCP's own."""
        of_others = characters("self") - characters(f"self/task/{threading.get_native_id()}")  # this thread reads /proc
        return self._rate("bytes", of_others + tcp_bytes()) >= BYTES_PER_S

    def _waits_for_disk(self) -> bool:
        """In a call such as fsync that cannot even be interrupted (state D)."""
        return Path(f"/proc/self/task/{self.main.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "D"

    def _processes_work(self) -> bool:
        """Whether a process that it has started computes; or a worker of a loader sleeps and wakes, or reads."""
        import psutil

        workers = {p.pid for p in list(multiprocess._children)}  # not active_children(): that one also reaps them
        is_active = False
        for p in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, OSError):
                times = p.cpu_times()
                busy = times.user + times.system + _waited_for_a_core(p.pid)
                is_active |= self._rate(f"cpu of {p.pid}", busy) >= BUSY
                if p.pid in workers:
                    switches = p.num_ctx_switches().voluntary
                    is_active |= self._rate(f"switches of {p.pid}", switches) >= SWITCHES_PER_S
                    is_active |= self._rate(f"bytes of {p.pid}", characters(str(p.pid))) >= BYTES_PER_S
        return is_active

    def _rate(self, name: str, value: float) -> float:
        """By how much `value` has risen per second since the last look; 0 at the first."""
        now = time.monotonic()
        then, before = self.samples.get(name, (now, value))
        self.samples[name] = (now, value)
        return (value - before) / (now - then) if now > then else 0.0


def positions(frame: FrameType | None) -> tuple:
    """Where in its code each frame of a stack is, innermost first."""
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < DEEPEST:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def characters(pid: str) -> int:
    """Bytes that a process, or a thread, has read and written so far, from caches as well; 0 where none are counted."""
    try:
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:
        return 0
    return int(rows["rchar"]) + int(rows["wchar"])


def tcp_bytes() -> int:
    """Bytes that have come and gone through this process's TCP connections that are open now. Linux; elsewhere 0."""
    total = 0
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, struct.error), _socket(int(name)) as connection:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += sum(struct.unpack("=QQ", information[slice(*TCP_BYTES)]))
    return total


def _socket(descriptor: int) -> socket.socket:
    """A second handle on a socket, to be closed. OSError if it is none."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        raise OSError
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _waited_for_a_core(pid: int) -> float:
    """Seconds for which a process's first thread could have run and was not let: on a machine that is too busy."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Counts:
    """What torch has counted, once the program has loaded torch: nothing here loads it."""

    def __init__(self) -> None:
        self.optimizer_steps = self.batches = 0
        self.hooked: set[str] = set()

    def now(self) -> tuple:
        """Changes whenever a collective begins or ends, an optimizer has made a step, or a loader gives a batch."""
        self._hook()
        return self.optimizer_steps, self.batches, *(dump(includeCollectives=False) for dump in self._dumps())

    def nccl_is_under_way(self) -> bool:
        """Whether NCCL has not ended all that it was given."""
        import json

        for dump in self._dumps()[1:]:
            for group in json.loads(dump(includeCollectives=False)).get("pg_status", {}).values():
                if int(group["last_enqueued_collective"]) > int(group["last_completed_collective"]):
                    return True
        return False

    def _dumps(self) -> list[Callable[..., bytes]]:
        """Of the recorders of gloo and of NCCL."""
        return _compat.flight_recorders_in_json()

    def _hook(self) -> None:
        """Count from now on what the program's torch does, once that part of it is loaded."""
        optimizer, iterator = sys.modules.get("torch.optim.optimizer"), _compat.loaded_loader_iterator()
        if "optimizer" not in self.hooked and hasattr(optimizer, "register_optimizer_step_post_hook"):
            self.hooked.add("optimizer")
            optimizer.register_optimizer_step_post_hook(self._stepped)
        if "loader" not in self.hooked and iterator is not None:
            self.hooked.add("loader")
            iterator.__next__ = Counted(iterator.__next__, self)

    def _stepped(self, *_: object) -> None:
        self.optimizer_steps += 1


class Counted:
    """A method that is counted when it is looked up. It then runs as it is: no traceback shows that it was counted."""

    def __init__(self, method: Callable, counts: Counts) -> None:
        self.method, self.counts = method, counts

    def __get__(self, instance: Any, owner: type) -> Callable:
        """The method itself."""
        self.counts.batches += instance is not None
        return self.method.__get__(instance, owner)
