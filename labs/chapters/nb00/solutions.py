"""Reference solutions of notebook 00."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence


def nvml_indices(cuda_uuids: Sequence[str], nvml_uuids: Sequence[str]) -> list[int | None]:
    """NVML index of each CUDA device, in CUDA order; None for a device that NVML does not list."""
    known = {uuid.lower().removeprefix("gpu-"): index for index, uuid in enumerate(nvml_uuids)}
    return [known.get(uuid.lower().removeprefix("gpu-")) for uuid in cuda_uuids]


def usable_cores(affinity: Collection[int], cpu_max: str) -> int:
    """Threads that can run all the time: the affinity's cores, cut by the quota, at least 1."""
    quota, period = cpu_max.split()
    if quota == "max":
        return len(affinity)
    return max(1, min(len(affinity), math.floor(int(quota) / int(period))))


def attainable_flop_s(intensity: float, peak_flop_s: float, bandwidth_b_s: float) -> float:
    """The roofline: memory limits up to the ridge, arithmetic from there on."""
    return min(peak_flop_s, intensity * bandwidth_b_s)


def busbw_gb_s(size_bytes: float, seconds: float, ranks: int) -> float:
    """Bus bandwidth of an all-reduce in 10^9 byte/s: size / time x 2 (n - 1) / n."""
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / 1e9
