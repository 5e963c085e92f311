"""Does this process make progress? The watchdog thread asks about once per second.

A hung training run does nothing at all, while a slow one or its workers compute, read or write. No single sign fits all
programs, so any one counts. Imports no torch.
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
"""Share of a core above which a process computes; a thread that logs or polls a store uses less."""
BYTES_PER_S = 65_536
"""Rate above which a process reads or writes; this probe and a logger stay below it."""
SWITCHES_PER_S = 1.0
"""Rate at which a busy loader worker sleeps and wakes; an idle one wakes every 5 s."""
TCP_BYTES = (120, 136)  # bytes_acked and bytes_received in struct tcp_info, linux/tcp.h
DEEPEST = 500  # maximum number of stack frames to read


class ActivityProbe:
    """`look()` names the sign of progress since the last look, or returns ""."""

    def __init__(self) -> None:
        self.main = threading.main_thread()
        self.counts = Counts()
        self.counted: Any = None
        self.known_stacks: set[tuple] = set()
        self.samples: dict[str, tuple[float, Any]] = {}

    def look(self) -> str:
        """Check cheap signs first and stop at the first one; a sign that wasn't read starts over."""
        signs: dict[str, Callable[[], bool]] = {
            "steps": self._counts_changed,
            "stack": self._stack_is_new,
            "computing": self._computes,
            "input or output": self._reads_or_writes,
            "disk": self._waits_for_disk,
            "processes": self._processes_work,
        }
        for name, sign in signs.items():
            with suppress(OSError):  # the process or file has gone in the meantime
                if sign():
                    return name
        return ""

    def _counts_changed(self) -> bool:
        """Compare collectives, optimizer steps and batches."""
        before, self.counted = self.counted, self.counts.now()
        if before == self.counted:
            return False
        self.known_stacks.clear()
        return True

    def _stack_is_new(self) -> bool:
        """Return whether the main thread is at a place not seen since the last progress.

        A different place is not enough: a waiting loop alternates between a few places forever.
        """
        stack = positions(sys._current_frames().get(self.main.ident or 0))
        new = stack not in self.known_stacks
        self.known_stacks.add(stack)
        return new

    def _computes(self) -> bool:
        """Measure all threads but this one, plus the time in which the main thread could have run but found no free
        core.

        A host that waits for NCCL spins, which isn't work: then only a new stack counts.
        """
        busy = time.process_time() - time.thread_time() + _waited_for_a_core(os.getpid())
        share = self._rate("computing", busy)
        return share >= BUSY and not self.counts.nccl_is_under_way()

    def _reads_or_writes(self) -> bool:
        """Count file bytes by the kernel's counter, socket bytes by TCP's."""
        of_others = characters("self") - characters(f"self/task/{threading.get_native_id()}")  # this thread reads /proc
        return self._rate("bytes", of_others + tcp_bytes()) >= BYTES_PER_S

    def _waits_for_disk(self) -> bool:
        """Return whether the main thread is in an uninterruptible call such as fsync (state D)."""
        return Path(f"/proc/self/task/{self.main.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "D"

    def _processes_work(self) -> bool:
        """Return whether a child process computes, or a loader worker sleeps and wakes, or reads."""
        import psutil

        workers = {p.pid for p in list(multiprocess._children)}  # active_children() would also reap them
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
        """Return how much `value` has risen per second since the last look; 0 at the first."""
        now = time.monotonic()
        then, before = self.samples.get(name, (now, value))
        self.samples[name] = (now, value)
        return (value - before) / (now - then) if now > then else 0.0


def positions(frame: FrameType | None) -> tuple:
    """Return each stack frame's position in its code, innermost first."""
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < DEEPEST:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def characters(pid: str) -> int:
    """Return bytes that a process or thread has read and written so far, including from caches; 0 if not counted."""
    try:
        rows = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:
        return 0
    return int(rows["rchar"]) + int(rows["wchar"])


def tcp_bytes() -> int:
    """Return bytes sent and received through this process's open TCP connections. Linux; elsewhere 0."""
    total = 0
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError, struct.error), _socket(int(name)) as connection:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += sum(struct.unpack("=QQ", information[slice(*TCP_BYTES)]))
    return total


def _socket(descriptor: int) -> socket.socket:
    """Return a second handle on a socket; the caller closes it. OSError if it isn't one."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        raise OSError
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _waited_for_a_core(pid: int) -> float:
    """Return how many seconds a process's first thread was ready to run but got no core."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Counts:
    """PyTorch's counters, once the program has loaded torch; this class never loads it."""

    def __init__(self) -> None:
        self.optimizer_steps = self.batches = 0
        self.hooked: set[str] = set()

    def now(self) -> tuple:
        """Return a tuple that changes with every collective's begin or end, optimizer step, or batch."""
        self._hook()
        return self.optimizer_steps, self.batches, *(dump(includeCollectives=False) for dump in self._dumps())

    def nccl_is_under_way(self) -> bool:
        """Return whether NCCL still has unfinished work."""
        import json

        for dump in self._dumps()[1:]:
            for group in json.loads(dump(includeCollectives=False)).get("pg_status", {}).values():
                if int(group["last_enqueued_collective"]) > int(group["last_completed_collective"]):
                    return True
        return False

    def _dumps(self) -> list[Callable[..., bytes]]:
        """Return the dump functions of gloo's and NCCL's recorders."""
        return _compat.flight_recorders_in_json()

    def _hook(self) -> None:
        """Start counting steps and batches once the program has loaded that part of torch."""
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
    """Counts a method when it is looked up. The method runs unchanged, so no traceback shows the counter."""

    def __init__(self, method: Callable, counts: Counts) -> None:
        self.method, self.counts = method, counts

    def __get__(self, instance: Any, owner: type) -> Callable:
        """Return the method itself."""
        self.counts.batches += instance is not None
        return self.method.__get__(instance, owner)
