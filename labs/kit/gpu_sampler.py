"""The monitor's readings of GPUs, through NVML, which does not initialise CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from labs.kit.nvml import library, report
from labs.kit.samplers import Key
from labs.kit.visible import visible

READINGS = (
    ("gpu_percent", "%", lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu),
    ("gpu_memory_bytes", "B", lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used),
    ("gpu_power_w", "W", lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3),  # NVML gives mW
    ("gpu_sm_clock_mhz", "MHz", lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM)),
)
# NVML counts these over 20 ms while the caller waits, and gives KB/s: once a second is enough.
SLOW_READINGS = (
    (
        "gpu_pcie_rx_bytes_per_s",
        "B/s",
        lambda n, h: 1e3 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES),
    ),
    (
        "gpu_pcie_tx_bytes_per_s",
        "B/s",
        lambda n, h: 1e3 * n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES),
    ),
)
SLOW_PERIOD_S = 1.0


class GpuSampler:
    """Utilisation, memory, power, clock and PCIe traffic of the visible GPUs; nothing without NVML.

    Utilisation is NVML's: the share of time in which any kernel ran, not how much of the GPU it used.
    GPUs carry CUDA's numbers, or NVML's where the two cannot be matched.
    """

    def __init__(self, nvml: Any = None) -> None:
        self.nvml: Any = None
        self._handles: dict[int, Any] = {}
        self._unsupported: set[tuple[int, str]] = set()
        self._next_slow = 0.0
        try:
            nvml = library(nvml)
            nvml.nvmlInit()
        except ImportError:
            return
        except nvml.NVMLError:  # no driver: a machine without a GPU
            return
        self.nvml = nvml
        self._handles = {i: nvml.nvmlDeviceGetHandleByIndex(n) for i, n in _indices(nvml).items()}

    def sample(self, pids: dict[int, int]) -> Iterator[tuple[Key, float]]:
        """(key, value) pairs of one moment. A reading that a GPU does not offer is left out from then on."""
        readings = READINGS
        if self._handles and (now := time.monotonic()) >= self._next_slow:
            readings, self._next_slow = READINGS + SLOW_READINGS, now + SLOW_PERIOD_S
        for index, handle in self._handles.items():
            for name, unit, read in readings:
                if (index, name) in self._unsupported:
                    continue
                try:
                    yield Key(name, unit, (("gpu", index),)), float(read(self.nvml, handle))
                except (AttributeError, self.nvml.NVMLError):
                    self._unsupported.add((index, name))

    def close(self) -> None:
        """Let go of the driver."""
        if self.nvml is not None:
            self.nvml.nvmlShutdown()
            self.nvml = None


def _indices(nvml: Any) -> dict[int, int]:
    """CUDA index -> NVML index of the visible GPUs."""
    cards = report(nvml)
    shown = visible(cards) or []
    if any(v.nvml_index is None for v in shown):
        return {g.index: g.index for g in cards.gpus}
    return {v.cuda_index: v.nvml_index for v in shown if v.nvml_index is not None}
