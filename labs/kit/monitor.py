"""Sample the machine while a lab runs: processor and memory (psutil), GPUs (NVML, which doesn't initialise CUDA).

    with Monitor(pids) as monitor:      # pids() -> {rank: process id}, called again at every sample
        ...
    monitor.trace.disturbance()         # "" or a sentence on how much CPU other programs took

The thread shares its core with the ranks. It therefore times itself (`Trace.cost_fraction`) and samples less often
where sampling is expensive: many cores, many processes, a slow driver.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from labs.kit.host import affinity
from labs.kit.nvml import library, report, visible

MAX_SAMPLES = 1200  # then every second one is dropped and the period doubles, so memory stays bounded
COST_LIMIT = 0.005  # share of one core; the period grows to stay below it
DISTURBED_PERCENT = 10.0


@dataclass(frozen=True)
class Series:
    """One quantity over time. `values[i]` belongs to `Trace.t_s[i]`; None if nothing was read.

    `per` says what it belongs to, for example `{"core": 1, "rank": 1}` or `{"gpu": 0}`.
    """

    name: str
    unit: str
    values: list[float | None]
    per: dict[str, int]

    @property
    def present(self) -> list[float]:
        """The values that were read."""
        return [v for v in self.values if v is not None]


@dataclass(frozen=True)
class Trace:
    """All samples of one run. `t_s` is in seconds since the monitor started."""

    t_s: list[float] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    cost_fraction: float = 0.0
    """CPU seconds spent on sampling, as a share of elapsed time."""
    failures: tuple[str, ...] = ()
    """The distinct errors met while sampling."""
    neighbours_percent: float = math.nan
    """Mean share of the usable cores that processes outside this run took."""
    rank_of_core: dict[int, int] = field(default_factory=dict)
    """The rank that is pinned to each core."""

    def find(self, name: str, **per: int) -> list[Series]:
        """Return the series of this name whose `per` contains the given items."""
        return [s for s in self.series if s.name == name and all(s.per.get(k) == v for k, v in per.items())]

    def peak(self, name: str, **per: int) -> float:
        """Return the maximum of the matching series; NaN if there is none."""
        return max((v for s in self.find(name, **per) for v in s.present), default=math.nan)

    @property
    def energy_j(self) -> float:
        """Joules that all GPU boards used between the first and last sample, by NVML's counter (Volta or newer).

        Includes other users of the GPUs. NaN if no GPU has the counter.
        """
        found = [s.present for s in self.find("gpu_energy_j") if len(s.present) > 1]
        return sum(values[-1] - values[0] for values in found) if found else math.nan

    def disturbance(self, limit_percent: float = DISTURBED_PERCENT) -> str:
        """Return a sentence if other programs took more than `limit_percent` of the usable cores, otherwise ""."""
        if not self.neighbours_percent > limit_percent:
            return ""
        share = f"{self.neighbours_percent:.0f} % of the CPU"
        return (
            f"Other programs took {share} during this run: its timings may be disturbed. Run it again when it is quiet."
        )


class Monitor:
    """Sample in a thread every `period_s` seconds, as a context manager. Never raises into the run."""

    def __init__(
        self,
        pids: Callable[[], dict[int, int]],
        period_s: float = 0.2,
        nvml: Any = None,
        gpus: Collection[int] | None = None,
        cores: Collection[int] | None = None,
    ) -> None:
        """`cores`: logical CPUs to watch (default: this process's). A pinned rank passes those of its whole job.

        `gpus`: CUDA indices that ranks use (default: all). Ranks on cores pass none, so no idle GPU is shown.
        """
        self.pids, self.period_s = pids, period_s
        self._nvml, self._gpus, self._cores = nvml, gpus, cores
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._t_s: list[float] = []
        self._values: dict[Key, list[float | None]] = {}
        self._failures: dict[str, None] = {}
        self._cost_s = self._elapsed_s = 0.0
        self._samplers: list[Any] = []
        self._thread = threading.Thread(target=self._loop, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)  # a hanging driver must not hang the run

    @property
    def trace(self) -> Trace:
        """A copy of the samples so far; safe at any time, from any thread."""
        with self._lock:
            series = [Series(key.name, key.unit, list(v), dict(key.per)) for key, v in self._values.items()]
            cost = self._cost_s / self._elapsed_s if self._elapsed_s else 0.0
            cpu = next((s for s in self._samplers if isinstance(s, CpuSampler)), None)
            others, ranks = (cpu.neighbours_percent, dict(cpu.rank_of_core)) if cpu else (math.nan, {})
            return Trace(list(self._t_s), series, cost, tuple(self._failures), others, ranks)

    def _loop(self) -> None:
        for make in (lambda: CpuSampler(self._cores), lambda: GpuSampler(self._nvml, self._gpus)):
            self._guarded(lambda make=make: self._samplers.append(make()))
        self._cost_s += time.thread_time()  # the thread is new, so this is what opening the sources cost
        wait = self.period_s
        while not self._stop.wait(wait):
            wait = self._sample()
        self._sample()
        for sampler in self._samplers:
            self._guarded(sampler.close)

    def _sample(self) -> float:
        """Take one sample; return the seconds to wait until the next."""
        before = time.thread_time()
        row: dict[Key, float] = {}
        pids = self._guarded(self.pids) or {}
        for sampler in self._samplers:
            row.update(self._guarded(lambda s=sampler: dict(s.sample(pids))) or {})
        now = time.perf_counter() - self._start
        with self._lock:
            self._append(now, row)
            cost = time.thread_time() - before
            self._cost_s += cost
            self._elapsed_s = now
        return max(self.period_s - cost, cost / COST_LIMIT)

    def _append(self, now: float, row: dict[Key, float]) -> None:
        for key in row.keys() - self._values.keys():
            self._values[key] = [None] * len(self._t_s)
        self._t_s.append(now)
        for key, values in self._values.items():
            values.append(row.get(key))
        if len(self._t_s) >= MAX_SAMPLES:
            self.period_s *= 2
            for values in (self._t_s, *self._values.values()):
                del values[1:-1:2]  # keep the first and last, between which energy is counted

    def _guarded(self, read: Callable[[], Any]) -> Any:
        """Return what `read` returns. If it raises, note the error in the trace and return None."""
        try:
            return read()
        except Exception as e:
            self._failures.setdefault(f"{type(e).__name__}: {e}")
            return None


RESCAN_S = 1.0  # finding new child processes costs more than reading known ones
RESCAN_COST_LIMIT = 0.002  # of one core
SMOOTH_SAMPLES = 5  # CPU clocks tick every 10 ms, so differences over one 0.2 s interval are too coarse


class Key(NamedTuple):
    """Name, unit and owner of one series. `per` is a hashable tuple of (word, number) pairs."""

    name: str
    unit: str
    per: tuple[tuple[str, int], ...] = ()


def children_of(pid: int) -> list[int]:
    """Return the direct children of `pid`. Linux lists them per thread; elsewhere psutil scans all processes."""
    tasks = f"/proc/{pid}/task"
    if not os.path.exists("/proc/self/task"):
        return [p.pid for p in psutil.Process(pid).children()]
    found: list[int] = []
    for thread in os.listdir(tasks):
        with open(f"{tasks}/{thread}/children") as f:
            found += map(int, f.read().split())
    return found


def family(pid: int) -> list[int]:
    """Return `pid` and all its living descendants."""
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
    """Reads the use of each core, the resident memory of each rank with its children, and other programs' CPU use.

    Resident memory counts a page in every process that maps it, so forked workers also count shared pages.
    """

    def __init__(self, cores: Collection[int] | None = None) -> None:
        self.cores = tuple(cores or affinity())
        self._processes: dict[int, psutil.Process] = {}
        self._families: dict[int, list[int]] = {}
        self.rank_of_core: dict[int, int] = {}
        self._parents: dict[int, int] = {}
        self._next_scan = 0.0
        self._first = True
        self._before = {pid: self._used(pid) or 0.0 for pid in family(os.getpid())}
        self._busy = core_times(self.cores)
        self._window: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_SAMPLES + 1)
        self._total = (0.0, 0.0, 0.0)
        self._window.append(self._total)

    def sample(self, pids: dict[int, int]) -> Iterator[tuple[Key, float]]:
        """Yield (key, value) pairs of one moment, for ranks with process ids `pids`."""
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
                yield Key("cpu_percent", "%", (("core", core),)), 100.0 * max(0.0, min(1.0, busy / total))
        self._total = tuple(a + b for a, b in zip(self._total, (busy_s, own_s, elapsed_s), strict=True))
        yield Key("neighbours_percent", "%"), _share(self._window[0], self._total)
        self._window.append(self._total)
        for rank, pid in pids.items():
            resident = [self._resident(p) for p in self._families.get(pid, [pid])]
            if any(resident):
                yield Key("resident_bytes", "B", (("rank", rank),)), float(sum(resident))

    @property
    def neighbours_percent(self) -> float:
        """Mean over the run of the share of the usable cores that other processes took."""
        return _share((0.0, 0.0, 0.0), self._total)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _everyone(self) -> set[int]:
        return {pid for members in self._families.values() for pid in members}

    def _scan(self, pids: dict[int, int]) -> None:
        """Look for new children now and then, and when a rank starts or ends."""
        roots = {os.getpid(), *pids.values()}
        if roots == self._families.keys() and time.monotonic() < self._next_scan:
            return
        start = time.thread_time()
        self._families = {pid: family(pid) for pid in roots}
        self.rank_of_core.update({core: rank for rank, pid in pids.items() for core in self._pinned(pid)})
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
        """Return the cores of a pinned rank; [] if it may use all."""
        try:
            cores = self._process(pid).cpu_affinity()
        except (psutil.Error, AttributeError):  # macOS has no affinity
            return []
        return [c for c in cores if c in self._busy] if len(cores) < len(self.cores) else []

    def _spent(self, pid: int, everyone: set[int]) -> float:
        """Return the CPU seconds used since the last sample by `pid` and its children that ended.

        If a process is older than this sampler, only what it uses from then on counts. Children too short-lived to be
        seen are counted through their parent. When a child that was seen ends, what was counted is subtracted, since
        the system then adds its total to the parent.
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
        """Return the CPU seconds of `pid` and its ended children; None if it has ended."""
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


def core_times(cores: Iterable[int]) -> dict[int, tuple[float, float]]:
    """Return (busy seconds, total seconds) of each core since the system started."""
    wanted, found = set(cores), {}
    for number, t in enumerate(psutil.cpu_times(percpu=True)):
        if number in wanted:
            guest = getattr(t, "guest", 0.0) + getattr(t, "guest_nice", 0.0)  # Linux also counts these in user
            total = sum(t) - guest
            found[number] = (total - t.idle - getattr(t, "iowait", 0.0), total)
    return found


def _share(before: tuple[float, ...], now: tuple[float, ...]) -> float:
    """Return the percentage of core seconds between two (busy, own, total) readings that others used."""
    busy, own, total = (b - a for a, b in zip(before, now, strict=True))
    return 100.0 * max(0.0, busy - own) / total if total > 0 else 0.0


READINGS = (
    ("gpu_percent", "%", lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu),
    ("gpu_memory_bytes", "B", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used),
    ("gpu_energy_j", "J", lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3),  # since the driver was loaded
)


class GpuSampler:
    """Reads utilisation, memory and energy of the visible GPUs; nothing without NVML.

    NVML's utilisation is the share of time in which any kernel ran, not how much of the GPU it used. GPUs have CUDA's
    numbers, or NVML's if the two can't be matched.
    """

    def __init__(self, nvml: Any = None, gpus: Collection[int] | None = None) -> None:
        self.nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._unsupported: set[tuple[int, str]] = set()
        if gpus is not None and not gpus:
            return
        try:
            nvml = library(nvml)
            nvml.nvmlInit()
        except ImportError:
            return
        except nvml.NVMLError:  # no driver, so no GPU
            return
        self.nvml = nvml
        self._handles = _handles(nvml, gpus)

    def sample(self, pids: dict[int, int]) -> Iterator[tuple[Key, float]]:
        """Yield (key, value) pairs of one moment. A reading that fails once isn't tried again."""
        for index, handle in self._handles.items():
            for name, unit, read in READINGS:
                if (index, name) in self._unsupported:
                    continue
                try:
                    yield Key(name, unit, (("gpu", index),)), float(read(self.nvml, handle))
                except (AttributeError, self.nvml.NVMLError):
                    self._unsupported.add((index, name))

    def close(self) -> None:
        if self.nvml is not None:
            self.nvml.nvmlShutdown()
            self.nvml = None


def _handles(nvml: Any, gpus: Collection[int] | None) -> dict[int, Any]:
    """Return {CUDA index: NVML handle} of `gpus`. A MIG instance has its own, for its own memory."""
    cards = report(nvml, brief=True)
    shown = visible(cards) or []
    if any(v.nvml_index is None for v in shown):  # we can't know which ones are in use
        return {g.index: nvml.nvmlDeviceGetHandleByIndex(g.index) for g in cards.gpus}
    return {
        v.cuda_index: nvml.nvmlDeviceGetHandleByUUID(v.uuid) if v.mig else nvml.nvmlDeviceGetHandleByIndex(v.nvml_index)
        for v in shown
        if gpus is None or v.cuda_index in gpus
    }
