"""The monitor: what it sees, what it costs, and that it never harms the run it watches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import psutil
import pytest

from labs.kit import monitor as module
from labs.kit import samplers
from labs.kit.gpu_sampler import GpuSampler
from labs.kit.monitor import Monitor, Series, Trace, strip_html, strip_svg
from labs.kit.samplers import CpuSampler, Key, children_of, family

BUSY = "import time; b = bytearray(60_000_000); t = time.time()\nwhile time.time() - t < {0}: pass"
CHILD = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; b = bytearray(80_000_000); time.sleep(1.5)"])
"""


def python(code: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code])


def watch(processes: dict[int, subprocess.Popen], period_s=0.1) -> Trace:
    """The trace of a run that ends when all processes have ended."""
    with Monitor(lambda: {r: p.pid for r, p in processes.items()}, period_s) as m:
        for p in processes.values():
            p.wait(20)
    return m.trace


def test_sees_a_busy_rank_its_memory_and_its_core():
    trace = watch({0: python(BUSY.format(1.2))})
    assert max(trace.peak("cpu_percent", core=c) for c in samplers.usable_cores()) > 50
    assert 60e6 < trace.peak("resident_bytes", rank=0) < 120e6
    assert not trace.failures
    assert all(len(s.values) == len(trace.t_s) for s in trace.series)
    assert trace.t_s == sorted(trace.t_s)


def test_counts_the_memory_of_child_processes():
    trace = watch({0: python(CHILD)})
    assert trace.peak("resident_bytes", rank=0) > 90e6


def test_our_own_work_is_not_taken_for_a_neighbours():
    sampler = CpuSampler()
    worker = python(BUSY.format(2))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        list(sampler.sample({0: worker.pid}))
        time.sleep(0.1)
    own = sampler._total[1]
    worker.kill()
    worker.wait(5)
    assert own > 0.5 * 1.0  # about one core second of the rank, on a machine that may be shared


SPAWNS = """import subprocess, sys, time
burn = "import time; end = time.process_time() + 0.15\\nwhile time.process_time() < end: pass"
for _ in range(6): subprocess.run([sys.executable, "-S", "-c", burn])
time.sleep(9)"""


def test_children_too_short_lived_to_be_seen_are_counted_once_with_their_parent():
    before = sum(psutil.Process().cpu_times()[:4])
    sampler = CpuSampler()
    parent = python(SPAWNS)
    try:
        deadline = time.monotonic() + 20
        while sum(psutil.Process(parent.pid).cpu_times()[2:4]) < 6 * 0.15 and time.monotonic() < deadline:
            list(sampler.sample({0: parent.pid}))
            time.sleep(0.02)
        list(sampler.sample({0: parent.pid}))
        all_of_us = sum(psutil.Process(parent.pid).cpu_times()[:4]) + sum(psutil.Process().cpu_times()[:4]) - before
        assert 6 * 0.15 <= sampler._total[1] <= all_of_us + 0.05
    finally:
        parent.kill()
        parent.wait(5)


def test_a_strangers_work_is_a_neighbours(monkeypatch):
    sampler = CpuSampler()
    monkeypatch.setattr(samplers, "family", lambda pid: [pid])  # its child is then nobody we know
    worker = python(BUSY.format(2))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        list(sampler.sample({}))
        time.sleep(0.1)
    worker.kill()
    worker.wait(5)
    busy, own, _ = sampler._total
    assert busy - own > 0.4 and sampler.neighbours_percent > 100 * 0.4 / len(sampler.cores)


def test_ranks_may_come_and_go():
    late: dict[int, int] = {}
    with Monitor(lambda: dict(late), period_s=0.05) as m:
        time.sleep(0.2)
        worker = python(BUSY.format(0.4))
        late[3] = worker.pid
        worker.wait(5)
        time.sleep(0.2)
    (series,) = m.trace.find("resident_bytes", rank=3)
    assert series.values[0] is None and series.values[-1] is None and series.present
    assert not m.trace.failures


def test_a_failing_source_is_noted_once_and_the_run_goes_on():
    def pids():
        raise OSError("no such folder")

    with Monitor(pids, period_s=0.02) as m:
        time.sleep(0.3)
    assert m.trace.failures == ("OSError: no such folder",)
    assert len(m.trace.t_s) > 3


def test_costs_less_than_one_percent_of_a_core():
    workers = [python("import time; time.sleep(3)") for _ in range(4)]
    with Monitor(lambda: {i: w.pid for i, w in enumerate(workers)}) as m:
        time.sleep(2.5)
    for w in workers:
        w.kill()
        w.wait(5)
    assert 0 < m.trace.cost_fraction < 0.01  # CPU time of the thread over elapsed time: load does not matter


def test_a_dear_source_is_asked_less_often(monkeypatch):
    def dear(self, pids):
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        yield Key("x", "B"), 1.0

    monkeypatch.setattr(CpuSampler, "sample", dear)
    with Monitor(dict, period_s=0.02) as m:
        time.sleep(0.5)
    assert len(m.trace.t_s) <= 3


def test_long_runs_stay_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_SAMPLES", 10)
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
            strip_svg(trace)
    assert threading.active_count() == before


def test_children_are_found_without_a_scan_of_all_processes():
    worker = python("import time; time.sleep(5)")
    assert worker.pid in children_of(os.getpid())
    assert set(family(os.getpid())) >= {os.getpid(), worker.pid}
    worker.kill()
    worker.wait(5)
    assert family(worker.pid) == [worker.pid]  # gone: no error


def test_records_are_plain_data_with_the_owner_as_case():
    rows = example(2).records("ddp")
    assert {"lab", "metric", "unit", "samples", "kind", "case"} == set(rows[0])
    row = next(r for r in rows if r["metric"] == "resident_bytes" and r["case"] == {"rank": 1})
    assert row["lab"] == "ddp" and row["unit"] == "B" and None not in row["samples"]


# --- GPUs, through a stand-in for NVML


class NVMLError(Exception):
    value = 3


class FakeNvml(SimpleNamespace):
    """Two GPUs; PCIe counters are not supported on the second."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 1, 0
    slow_calls = 0
    open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda i: i)
    nvmlDeviceGetUUID = staticmethod(lambda h: f"GPU-{'ab'[h]}")
    nvmlDeviceGetName = staticmethod(lambda h: "H200")
    nvmlDeviceGetUtilizationRates = staticmethod(lambda h: SimpleNamespace(gpu=90 - h, memory=5))
    nvmlDeviceGetMemoryInfo = staticmethod(lambda h: SimpleNamespace(used=3_000_000_000, total=9, free=1))
    nvmlDeviceGetPowerUsage = staticmethod(lambda h: 412_000)
    nvmlDeviceGetClockInfo = staticmethod(lambda h, kind: 1980)

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        self.slow_calls += 1
        if handle == 1:
            raise NVMLError("not supported")
        return 2000


def test_gpu_readings_and_their_units(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml()
    with Monitor(dict, period_s=0.05, nvml=nvml) as m:
        time.sleep(0.4)
    trace = m.trace
    assert trace.peak("gpu_percent", gpu=0) == 90 and trace.peak("gpu_percent", gpu=1) == 89
    assert trace.peak("gpu_power_w") == 412 and trace.peak("gpu_sm_clock_mhz") == 1980
    assert trace.peak("gpu_memory_bytes", gpu=1) == 3e9
    assert trace.peak("gpu_pcie_rx_bytes_per_s", gpu=0) == 2e6  # NVML counts in KB/s
    assert not trace.find("gpu_pcie_rx_bytes_per_s", gpu=1) and not trace.failures
    assert nvml.open == 0


def test_slow_readings_are_rare_and_unsupported_ones_are_not_repeated():
    nvml = FakeNvml()
    sampler = GpuSampler(nvml)
    for _ in range(20):
        list(sampler.sample({}))
    assert nvml.slow_calls == 4


def test_only_visible_gpus_are_sampled_under_cudas_numbers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    keys = {k.per for k, v in GpuSampler(FakeNvml()).sample({})}
    readings = dict(GpuSampler(FakeNvml()).sample({}))
    assert keys == {(("gpu", 0),)}
    assert readings[Key("gpu_percent", "%", (("gpu", 0),))] == 89


def test_a_machine_without_a_driver_has_no_gpus():
    class NoDriver(FakeNvml):
        def nvmlInit(self):
            raise NVMLError("driver not loaded")

    with Monitor(dict, period_s=0.05, nvml=NoDriver()) as m:
        time.sleep(0.15)
    assert not m.trace.find("gpu_percent") and not m.trace.failures


def test_a_gpu_that_falls_off_the_bus_does_not_stop_the_run():
    class Lost(FakeNvml):
        nvmlDeviceGetUtilizationRates = staticmethod(lambda h: (_ for _ in ()).throw(NVMLError("GPU is lost")))

    with Monitor(dict, period_s=0.05, nvml=Lost()) as m:
        time.sleep(0.2)
    assert not m.trace.find("gpu_percent") and m.trace.find("cpu_percent")


# --- The strip


def example(ranks: int, samples: int = 50, gpus: int = 0, others: float = 4.0) -> Trace:
    t_s = [0.2 * (i + 1) for i in range(samples)]
    wave = [50.0 + 50 * ((i * 7 + 3) % 11 - 5) / 5 for i in range(samples)]
    series = [Series("cpu_percent", "%", wave, {"core": i, "rank": i}) for i in range(ranks)]
    series += [
        Series("resident_bytes", "B", [4e8 + 1e6 * i for i in range(samples)], {"rank": i}) for i in range(ranks)
    ]
    series += [Series("gpu_percent", "%", wave, {"gpu": i}) for i in range(gpus)]
    series += [Series("gpu_memory_bytes", "B", [2.5e10] * samples, {"gpu": i}) for i in range(gpus)]
    series.append(Series("neighbours_percent", "%", [others] * samples, {}))
    return Trace(t_s, series, 0.002, (), others)


@pytest.mark.parametrize(
    ("ranks", "samples", "gpus"), [(1, 1, 0), (2, 50, 0), (2, 1000, 0), (8, 1000, 8), (64, 1000, 0)]
)
def test_strip_is_small_valid_and_described(ranks, samples, gpus):
    svg = strip_svg(example(ranks, samples, gpus))
    assert len(svg) < 4096
    root = ET.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") == root[0].text
    assert root[0].tag.endswith("title") and "%" in root[0].text
    assert len(re.findall("<g transform", svg)) == min(8, gpus or ranks) + 1


def test_strip_of_nothing_and_of_a_run_without_ranks():
    ET.fromstring(strip_svg(Trace()))
    ET.fromstring(strip_svg(example(0, 5)))


def test_strip_names_lanes_peaks_and_time():
    svg = strip_svg(example(2))
    for text in ("core 0, rank 0", "core 1, rank 1", "449 MB", "others", "mean, peak", ">10 s<"):
        assert text in svg
    assert ">GPU 0<" in strip_svg(example(2, gpus=1)) and "25.0 GB" in strip_svg(example(2, gpus=1))


def test_strip_lanes_have_the_colours_of_their_ranks():
    fills = re.findall(r'fill="(#0072B2|#D55E00|#999)"', strip_svg(example(2)))
    assert fills == ["#0072B2", "#D55E00", "#999"]


def test_a_core_that_got_its_rank_late_is_one_lane():
    early = Series("cpu_percent", "%", [10.0, None], {"core": 0})
    late = Series("cpu_percent", "%", [None, 90.0], {"core": 0, "rank": 0})
    svg = strip_svg(Trace([0.2, 0.4], [early, late]))
    assert svg.count("<g transform") == 1 and "core 0, rank 0" in svg and "50 %" in svg


def test_strip_is_cheap_to_draw():
    trace = example(2, 300)
    strip_svg(trace)
    best = min(_cpu_seconds(trace) for _ in range(20))
    assert best * 2 < 0.01  # two frames per second, CPU seconds: under one percent of a core


def _cpu_seconds(trace: Trace) -> float:
    start = time.thread_time()
    strip_svg(trace)
    return time.thread_time() - start


def test_strip_as_an_image_carries_the_same_text():
    found = re.fullmatch(r'<img alt="([^"]+)" src="data:image/svg\+xml,([^"]+)">', strip_html(example(2)))
    assert "core 0, rank 0" in found[1] and "#" not in found[2]


@pytest.mark.parametrize(("others", "disturbed"), [(4.0, False), (31.0, True), (float("nan"), False)])
def test_disturbance_is_said_in_words(others, disturbed):
    said = example(2, others=others).disturbance()
    assert bool(said) is disturbed and ("31 % of the CPU" in said) is disturbed
