"""The monitor's readings of processor and memory, through psutil."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import psutil

RESCAN_S = 1.0  # looking for new child processes costs more than reading known ones
RESCAN_COST_LIMIT = 0.002  # of one core
SMOOTH_SAMPLES = 5  # CPU clocks tick every 10 ms: a single 0.2 s interval is too coarse to subtract


class Key(NamedTuple):
    """Name, unit and owner of one series; `per` is a tuple of (word, number) pairs: it can be hashed."""

    name: str
    unit: str
    per: tuple[tuple[str, int], ...] = ()


def children_of(pid: int) -> list[int]:
    """Direct children of `pid`. Linux lists them per thread; elsewhere psutil scans all processes."""
    tasks = f"/proc/{pid}/task"
    if not os.path.exists("/proc/self/task"):
        return [p.pid for p in psutil.Process(pid).children()]
    found: list[int] = []
    for thread in os.listdir(tasks):
        with open(f"{tasks}/{thread}/children") as f:
            found += map(int, f.read().split())
    return found


def family(pid: int) -> list[int]:
    """`pid` and all its descendants that are alive."""
    found, ask = [pid], [pid]
    while ask:
        try:
            children = [c for c in children_of(ask.pop()) if c not in found]
        except (OSError, psutil.Error):
            continue
        found += children
        ask += children
    return found


class CpuSampler:
    """Use of each core, resident memory of each rank with its children, and what everything else takes.

    Resident bytes count a page in every process that maps it, so forked workers count the pages they share.
    """

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._processes: dict[int, psutil.Process] = {}
        self._families: dict[int, list[int]] = {}
        self._core_rank: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._next_scan = 0.0
        self._first = True
        self._before = {pid: self._used(pid) or 0.0 for pid in family(os.getpid())}
        self._busy = core_times(self.cores)
        self._window: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_SAMPLES + 1)
        self._total = (0.0, 0.0, 0.0)
        self._window.append(self._total)

    def sample(self, pids: dict[int, int]) -> Iterator[tuple[Key, float]]:
        """(key, value) pairs of one moment, for ranks with process ids `pids`."""
        self._scan(pids)
        everyone = self._everyone()
        own_s = sum(self._spent(pid, everyone) for pid in everyone | self._before.keys())
        self._first = False
        busy_s, elapsed_s = 0.0, 0.0
        before, self._busy = self._busy, core_times(self.cores)
        for core, (busy, total) in self._busy.items():
            busy, total = busy - before[core][0], total - before[core][1]
            busy_s, elapsed_s = busy_s + busy, elapsed_s + total
            if total > 0:
                yield self._core_key(core), 100.0 * max(0.0, min(1.0, busy / total))
        self._total = tuple(a + b for a, b in zip(self._total, (busy_s, own_s, elapsed_s), strict=True))
        yield Key("neighbours_percent", "%"), _share(self._window[0], self._total)
        self._window.append(self._total)
        for rank, pid in pids.items():
            resident = [self._resident(p) for p in self._families.get(pid, [pid])]
            if any(resident):
                yield Key("resident_bytes", "B", (("rank", rank),)), float(sum(resident))

    @property
    def neighbours_percent(self) -> float:
        """Mean over the whole run of the share of the usable cores that other processes took."""
        return _share((0.0, 0.0, 0.0), self._total)

    def close(self) -> None:
        """Nothing to release."""

    def _core_key(self, core: int) -> Key:
        rank = self._core_rank.get(core)
        return Key("cpu_percent", "%", (("core", core),) + ((("rank", rank),) if rank is not None else ()))

    def _everyone(self) -> set[int]:
        return {pid for members in self._families.values() for pid in members}

    def _scan(self, pids: dict[int, int]) -> None:
        """Look for new children now and then, and at once when a rank has come or gone."""
        roots = {os.getpid(), *pids.values()}
        if roots == self._families.keys() and time.monotonic() < self._next_scan:
            return
        start = time.thread_time()
        self._families = {pid: family(pid) for pid in roots}
        self._core_rank.update({core: rank for rank, pid in pids.items() for core in self._pinned(pid)})
        alive = self._everyone()
        self._processes = {pid: p for pid, p in self._processes.items() if pid in alive}
        cost = time.thread_time() - start
        self._next_scan = time.monotonic() + max(RESCAN_S, cost / RESCAN_COST_LIMIT)

    def _process(self, pid: int) -> psutil.Process:
        if pid not in self._processes:
            self._processes[pid] = process = psutil.Process(pid)
            self._parents[pid] = process.ppid()
        return self._processes[pid]

    def _pinned(self, pid: int) -> list[int]:
        """Cores of a rank that does not use them all; [] if it may run anywhere."""
        try:
            cores = self._process(pid).cpu_affinity()
        except (psutil.Error, AttributeError):  # macOS has no affinity
            return []
        return [c for c in cores if c in self._busy] if len(cores) < len(self.cores) else []

    def _spent(self, pid: int, everyone: set[int]) -> float:
        """CPU seconds `pid` and its children that ended have used since the last sample.

        Where a process was there before us, only what it uses from now on counts; all of it if it came later.
        Children that lived too short to be seen are counted by their parent. What was counted of one that was
        seen is taken back when it is gone, since the system then adds all of it to its parent.
        """
        used = self._used(pid)
        if used is None:
            counted = self._before.pop(pid, 0.0)
            return -counted if self._parents.get(pid) in everyone else 0.0
        stranger = self._first and pid not in self._families[os.getpid()]
        spent = used - self._before.get(pid, used if stranger else 0.0)
        self._before[pid] = used
        return spent

    def _used(self, pid: int) -> float | None:
        """CPU seconds of `pid` and of its children that have ended; None if it is gone itself."""
        try:
            times = self._process(pid).cpu_times()
        except psutil.Error:
            return None
        return times.user + times.system + times.children_user + times.children_system

    def _resident(self, pid: int) -> int:
        try:
            return self._process(pid).memory_info().rss
        except psutil.Error:
            return 0


def usable_cores() -> tuple[int, ...]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def core_times(cores: Iterable[int]) -> dict[int, tuple[float, float]]:
    """(busy seconds, all seconds) of each core since the system started."""
    wanted, found = set(cores), {}
    for number, t in enumerate(psutil.cpu_times(percpu=True)):
        if number in wanted:
            guest = getattr(t, "guest", 0.0) + getattr(t, "guest_nice", 0.0)  # Linux counts these in user, too
            total = sum(t) - guest
            found[number] = (total - t.idle - getattr(t, "iowait", 0.0), total)
    return found


def _share(before: tuple[float, ...], now: tuple[float, ...]) -> float:
    """Percent of the core seconds between two (busy, own, all) readings that were busy, but not for us."""
    busy, own, total = (b - a for a, b in zip(before, now, strict=True))
    return 100.0 * max(0.0, busy - own) / total if total > 0 else 0.0
