"""The monitor's readings of GPUs, through a stand-in for NVML, also one that fails."""

from __future__ import annotations

import math
from types import SimpleNamespace

from test_monitor import sampled

from labs.kit.monitor import GpuSampler, Key, Monitor


class NVMLError(Exception):
    value = 3


class FakeNvml(SimpleNamespace):
    """Two GPUs; PCIe counters are not supported on the second."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = 1, 1, 0
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


def test_gpu_readings_and_their_units(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = FakeNvml()
    with Monitor(dict, period_s=0.05, nvml=nvml) as m:
        sampled(m)
    trace = m.trace
    assert trace.peak("gpu_percent", gpu=0) == 90 and trace.peak("gpu_percent", gpu=1) == 89
    assert trace.peak("gpu_memory_bytes", gpu=1) == 3e9
    assert not trace.failures
    assert nvml.open == 0


def test_energy_is_the_difference_of_a_counter_over_all_gpus(monkeypatch):
    """10 J a reading on the first GPU, 5 on the second, which start elsewhere; the second of another run has none."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    counted = {0: 7e9, 1: 3e6}

    def total_mj(handle):
        counted[handle] += (10_000, 5_000)[handle]
        return counted[handle]

    nvml = FakeNvml(nvmlDeviceGetTotalEnergyConsumption=total_mj)
    with Monitor(dict, period_s=0.05, nvml=nvml) as m:
        sampled(m)
    readings = len(m.trace.t_s) - 1
    assert readings >= 1 and m.trace.energy_j == 15 * readings
    with Monitor(dict, period_s=0.05, nvml=FakeNvml()) as without:  # a card that does not count
        sampled(without)
    assert math.isnan(without.trace.energy_j) and not without.trace.failures


def test_only_visible_gpus_are_sampled_under_cudas_numbers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    keys = {k.per for k, v in GpuSampler(FakeNvml()).sample({})}
    readings = dict(GpuSampler(FakeNvml()).sample({}))
    assert keys == {(("gpu", 0),)}
    assert readings[Key("gpu_percent", "%", (("gpu", 0),))] == 89


def test_a_gpu_that_falls_off_the_bus_does_not_stop_the_run():
    class Lost(FakeNvml):
        nvmlDeviceGetUtilizationRates = staticmethod(lambda h: (_ for _ in ()).throw(NVMLError("GPU is lost")))

    with Monitor(dict, period_s=0.05, nvml=Lost()) as m:
        sampled(m, 2)
    assert not m.trace.find("gpu_percent") and m.trace.find("cpu_percent")


def test_ranks_on_cores_have_no_idle_gpu_lanes_and_ranks_on_one_gpu_have_one():
    class Asked(FakeNvml):
        def nvmlInit(self):
            raise AssertionError("nobody uses a GPU: the driver need not be asked")

    with Monitor(dict, period_s=0.05, nvml=Asked(), gpus=set()) as m:
        sampled(m, 2)
    assert not m.trace.find("gpu_percent") and not m.trace.failures
    keys = {k.per for k, _ in GpuSampler(FakeNvml(), {1}).sample({})}
    assert keys == {(("gpu", 1),)}


def test_a_mig_instance_is_read_by_its_own_handle(monkeypatch):
    class Mig(FakeNvml):
        nvmlDeviceGetCount = staticmethod(lambda: 1)
        nvmlDeviceGetMigMode = staticmethod(lambda h: (1, 1))
        nvmlDeviceGetMaxMigDeviceCount = staticmethod(lambda h: 1)
        nvmlDeviceGetMigDeviceHandleByIndex = staticmethod(lambda h, i: "MIG-a")
        nvmlDeviceGetUUID = staticmethod(lambda h: h if isinstance(h, str) else "GPU-a")
        nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)
        # No MIG instance has a utilisation of its own.
        nvmlDeviceGetUtilizationRates = staticmethod(lambda h: (_ for _ in ()).throw(NVMLError("not supported")))
        nvmlDeviceGetMemoryInfo = staticmethod(lambda h: SimpleNamespace(used=7 if h == "MIG-a" else 99, total=100))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = dict(GpuSampler(Mig()).sample({}))
    assert found[Key("gpu_memory_bytes", "B", (("gpu", 0),))] == 7 and not [k for k in found if k.name == "gpu_percent"]
