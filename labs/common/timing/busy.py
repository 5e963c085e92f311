"""Counters of busy time, and the busy share that they show in a time window."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from labs.kit import nvml
from labs.kit.errors import BadInput, require
from labs.kit.nvml import nvml_index_of

Mark = tuple[float, float]  # (clock, busy seconds so far), both in s


class Counter(Protocol):
    """Reports how long the device has been busy."""

    name: str
    memory_s: float
    """How far back a reading reaches, in s; only after this time does it cover the current job alone."""

    def busy_s(self) -> float:
        """Return seconds of work since some moment in the past."""


class CpuTime:
    """CPU seconds of all threads of this process: exact to about a microsecond, with no memory of the past."""

    name = "CPU time of the process"
    memory_s = 0.01

    def busy_s(self) -> float:
        return time.process_time()


class NvmlUtilization:
    """NVML's utilization.gpu of one GPU, integrated over time: each reading applies to the time since the last one.

    Source: NVML API reference, nvmlUtilization_t: percent of the past sample period, 1/6 to 1 s by product, during
    which one or more kernels was executing.
    """

    name = "NVML utilization.gpu"
    memory_s = 1.0

    def __init__(self, library: Any, handle: Any) -> None:
        self._read = lambda: nvml.ask(library, "nvmlDeviceGetUtilizationRates", handle)
        require(self._read() is not None, "NVML reads no utilization.gpu of this GPU (MIG, vGPU?): run on another one")
        self._total, self._last = 0.0, time.perf_counter()

    def busy_s(self) -> float:
        rates, now = self._read(), time.perf_counter()
        if rates is not None:
            self._total, self._last = self._total + rates.gpu / 100 * (now - self._last), now
        return self._total


@contextmanager
def counter_of(device: torch.device) -> Iterator[Counter]:
    """Yield the counter of `device`. BadInput, one line, if NVML can't provide one."""
    if device.type == "cpu":
        yield CpuTime()
        return
    require(device.type == "cuda", f"there is no counter for {device.type} devices: use --device cpu")
    found = nvml.report(brief=True)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    index = nvml_index_of([uuid], found.gpus)[0]
    if index is None:
        raise BadInput(f"NVML does not list this GPU ({found.problem or uuid}): {found.remedy or 'use --device cpu'}")
    with nvml.session() as library:
        yield NvmlUtilization(library, library.nvmlDeviceGetHandleByIndex(index))


def work_for(seconds: float, chunk: Callable[[], None], counter: Counter) -> list[Mark]:
    """Repeat `chunk` for at least `seconds`; read the counter before the first and after each."""
    marks = [(time.perf_counter(), counter.busy_s())]
    while marks[-1][0] - marks[0][0] < seconds:
        chunk()
        marks.append((time.perf_counter(), counter.busy_s()))
    return marks


def busy_between(marks: Sequence[Mark], start: float, end: float) -> float:
    """Return the busy share between two clock readings, interpolated linearly. Both must lie within the marks."""
    clocks = [clock for clock, _ in marks]

    def total(at: float) -> float:
        i = min(max(bisect.bisect_left(clocks, at), 1), len(marks) - 1)
        (t0, b0), (t1, b1) = marks[i - 1], marks[i]
        return b0 + (b1 - b0) * (at - t0) / (t1 - t0)

    return (total(end) - total(start)) / (end - start)
