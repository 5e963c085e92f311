"""The monitor: what it sees, what it costs, and that it never harms the run it watches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest
from processes import wait_for

from labs.kit import host
from labs.kit import monitor as monitor_module
from labs.kit.monitor import CpuSampler, Monitor, Trace, family

BUSY = "b = bytearray(60_000_000)\nwhile True: pass"


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def sampled(monitor: Monitor, n: int = 4) -> None:
    """Wait until there are `n` samples: a busy machine takes them later, and a dear one less often."""
    wait_for(lambda: len(monitor.trace.t_s) >= n, 30, f"{n} samples")


def watch(process: subprocess.Popen, seen: Callable[[Trace], bool], period_s=0.1) -> Trace:
    """The trace of a run of rank 0 that is ended when it shows what is looked for."""
    try:
        with Monitor(lambda: {0: process.pid}, period_s) as m:
            wait_for(lambda: seen(m.trace), 60, "what the trace is to show")
        return m.trace
    finally:
        for pid in reversed(family(process.pid)):
            psutil.Process(pid).kill()
        process.wait(5)


def test_sees_a_busy_rank_its_memory_and_its_core():
    def seen(trace):
        busy = any(trace.peak("cpu_percent", core=c) > 50 for c in host.affinity())
        return busy and trace.peak("resident_bytes", rank=0) > 60e6

    trace = watch(python(BUSY), seen)
    assert trace.peak("resident_bytes", rank=0) < 120e6
    assert not trace.failures
    assert all(len(s.values) == len(trace.t_s) for s in trace.series)
    assert trace.t_s == sorted(trace.t_s)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_pinned_rank_that_samples_watches_the_cores_of_its_job():
    """Under torchrun rank 0 samples and is pinned itself; its thread would see its own core only."""
    cores = tuple(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores[:1])
        assert CpuSampler().cores == cores[:1] and CpuSampler(cores).cores == cores
        with Monitor(lambda: {0: os.getpid()}, cores=cores) as monitor:
            wait_for(lambda: len(monitor.trace.t_s) > 1, 60, "two samples")
    finally:
        os.sched_setaffinity(0, cores)
    assert {dict(s.per)["core"] for s in monitor.trace.series if "core" in dict(s.per)} == set(cores)


def test_our_own_work_is_not_taken_for_a_neighbours():
    before = used_by_us()
    sampler = CpuSampler()
    worker = python(BUSY)
    try:
        spent = spend(worker, sampler, {0: worker.pid})
        assert spent <= sampler._total[1] <= used_by_us() - before + TICKS_S, "of the rank, and of this process"
    finally:
        worker.kill()
        worker.wait(5)


TICKS_S = 0.1  # the system counts in hundredths of a second, for each process


def used_by_us() -> float:
    """CPU seconds of this process and all that it has started: a fork server may still import torch."""
    return sum(sum(psutil.Process(pid).cpu_times()[:4]) for pid in family(os.getpid()))


def spend(worker: subprocess.Popen, sampler: CpuSampler, ranks: dict[int, int], cpu_s: float = 0.6) -> float:
    """Sample until `worker` has had that many CPU seconds, however long it takes; returns how many it had."""
    process = psutil.Process(worker.pid)

    def has_spent():
        list(sampler.sample(ranks))
        return sum(process.cpu_times()[:2]) >= cpu_s

    wait_for(has_spent, 60, f"{cpu_s} s of CPU time")
    spent = sum(process.cpu_times()[:2])
    list(sampler.sample(ranks))
    return spent


SPAWNS = """import subprocess, sys, time
burn = "import time; end = time.process_time() + 0.15\\nwhile time.process_time() < end: pass"
for _ in range(6): subprocess.run([sys.executable, "-S", "-c", burn])
time.sleep(600)"""


def test_children_too_short_lived_to_be_seen_are_counted_once_with_their_parent():
    before = used_by_us()
    sampler = CpuSampler()
    parent = python(SPAWNS)
    try:

        def children_have_ended():
            list(sampler.sample({0: parent.pid}))
            return sum(psutil.Process(parent.pid).cpu_times()[2:4]) >= 6 * 0.15

        wait_for(children_have_ended, 60, "six children")
        list(sampler.sample({0: parent.pid}))
        assert 6 * 0.15 <= sampler._total[1] <= used_by_us() - before + TICKS_S
    finally:
        parent.kill()
        parent.wait(5)


def test_a_strangers_work_is_a_neighbours(monkeypatch):
    sampler = CpuSampler()
    monkeypatch.setattr(monitor_module, "family", lambda pid: [pid])  # its child is then nobody we know
    worker = python(BUSY)
    try:
        spent = spend(worker, sampler, {})
    finally:
        worker.kill()
        worker.wait(5)
    busy, own, elapsed = sampler._total
    assert busy - own > 0.7 * spent, "the rest: the kernel counts cores in ticks"
    assert sampler.neighbours_percent >= 100 * 0.7 * spent / elapsed


def test_ranks_may_come_and_go():
    late: dict[int, int] = {}
    with Monitor(lambda: dict(late), period_s=0.05) as m:
        sampled(m, 1)
        worker = python(BUSY)
        late[3] = worker.pid
        wait_for(lambda: m.trace.find("resident_bytes", rank=3), 30, "the rank")
        worker.kill()
        worker.wait(5)
        sampled(m, len(m.trace.t_s) + 2)
    (series,) = m.trace.find("resident_bytes", rank=3)
    assert series.values[0] is None and series.values[-1] is None and series.present
    assert not m.trace.failures


def test_long_runs_stay_bounded(monkeypatch):
    monkeypatch.setattr(monitor_module, "MAX_SAMPLES", 10)
    with Monitor(dict, period_s=0.005) as m:
        deadline = time.monotonic() + 20  # a loaded machine needs longer for ten samples
        while m.period_s == 0.005 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert 0 < len(m.trace.t_s) < 10 and m.trace.t_s == sorted(m.trace.t_s)
    assert m.period_s > 0.005


@pytest.mark.drill
def test_may_be_read_while_it_runs_and_leaves_no_thread():
    before = threading.active_count()
    with Monitor(lambda: {0: os.getpid()}, period_s=0.01) as m:
        for _ in range(50):
            trace = m.trace
            assert all(len(s.values) == len(trace.t_s) for s in trace.series)
    assert threading.active_count() == before
