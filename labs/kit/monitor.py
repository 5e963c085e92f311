"""What the machine did while a lab ran: processor, memory and GPU readings, sampled in a thread.

    with Monitor(pids) as monitor:      # pids() -> {rank: process id}, asked again at every sample
        ...
    monitor.trace.disturbance()         # "" or a sentence on how much of the CPU other programs took

The thread shares its core with the ranks it watches. It therefore times itself (`Trace.cost_fraction`) and
samples less often where sampling is dear: many cores, many processes, a slow driver.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labs.kit.gpu_sampler import GpuSampler
from labs.kit.samplers import CpuSampler, Key
from labs.kit.strip import strip_html, strip_svg

__all__ = ["Monitor", "Series", "Trace", "strip_html", "strip_svg"]

MAX_SAMPLES = 1200  # then every second one is dropped and the period doubles: memory stays bounded
COST_LIMIT = 0.005  # of one core; the period is stretched to stay below it
DISTURBED_PERCENT = 10.0


@dataclass(frozen=True)
class Series:
    """One quantity over time; `values[i]` belongs to `Trace.t_s[i]`, None where there was nothing to read.

    `per` says whose it is, for example `{"core": 1, "rank": 1}` or `{"gpu": 0}`.
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
    """All samples of one run; `t_s` is in seconds since the monitor started."""

    t_s: list[float] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    cost_fraction: float = 0.0
    """CPU seconds that sampling took, as a share of the time that passed."""
    failures: tuple[str, ...] = ()
    """What could not be read, each reason once."""
    neighbours_percent: float = math.nan
    """Mean share of the usable cores that processes outside of this run took."""

    def find(self, name: str, **per: int) -> list[Series]:
        """Series of this name whose `per` holds all of the given items."""
        return [s for s in self.series if s.name == name and all(s.per.get(k) == v for k, v in per.items())]

    def peak(self, name: str, **per: int) -> float:
        """Greatest value of the matching series; NaN if there is none."""
        return max((v for s in self.find(name, **per) for v in s.present), default=math.nan)

    def mean(self, name: str, **per: int) -> float:
        """Mean over time and over the matching series; NaN if there is none."""
        values = [v for s in self.find(name, **per) for v in s.present]
        return statistics.fmean(values) if values else math.nan

    def disturbance(self, limit_percent: float = DISTURBED_PERCENT) -> str:
        """A sentence if other programs took more than `limit_percent` of the usable cores, otherwise ""."""
        if not self.neighbours_percent > limit_percent:
            return ""
        share = f"{self.neighbours_percent:.0f} % of the CPU"
        return f"Other programs took {share} during this run: its timings are disturbed. Run it again."

    def records(self, lab: str) -> list[dict[str, Any]]:
        """Every series as plain data in the form of a Record, without provenance."""
        return [
            {
                "lab": lab,
                "metric": s.name,
                "unit": s.unit,
                "samples": s.present,
                "kind": "measured",
                "case": s.per,
            }
            for s in self.series
            if s.present
        ]


class Monitor:
    """Context manager that samples from a thread every `period_s` seconds. It never raises into the run."""

    def __init__(self, pids: Callable[[], dict[int, int]], period_s: float = 0.2, nvml: Any = None) -> None:
        self.pids, self.period_s = pids, period_s
        self._nvml = nvml
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
        self._thread.join(timeout=2.0)  # a driver that hangs must not hang the run

    @property
    def trace(self) -> Trace:
        """A copy of what was sampled so far; may be asked for at any time, from any thread."""
        with self._lock:
            series = [Series(key.name, key.unit, list(v), dict(key.per)) for key, v in self._values.items()]
            cost = self._cost_s / self._elapsed_s if self._elapsed_s else 0.0
            others = next((s.neighbours_percent for s in self._samplers if isinstance(s, CpuSampler)), math.nan)
            return Trace(list(self._t_s), series, cost, tuple(self._failures), others)

    def _loop(self) -> None:
        for make in (CpuSampler, lambda: GpuSampler(self._nvml)):
            self._guarded(lambda make=make: self._samplers.append(make()))
        self._cost_s += time.thread_time()  # of a new thread: what opening the sources has cost
        wait = self.period_s
        while not self._stop.wait(wait):
            wait = self._sample()
        self._sample()
        for sampler in self._samplers:
            self._guarded(sampler.close)

    def _sample(self) -> float:
        """Take one sample; returns the seconds to wait until the next."""
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
                del values[::2]

    def _guarded(self, read: Callable[[], Any]) -> Any:
        """What `read` returns, or None: a reason that is new goes into the trace, the run goes on."""
        try:
            return read()
        except Exception as e:
            self._failures.setdefault(f"{type(e).__name__}: {e}")
            return None
