"""Bandwidth of collectives as nccl-tests defines it, and the model "latency plus size over bandwidth".

Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md. `bytes` is the size of one rank's buffer; for all-gather and
reduce-scatter it is the size of the whole, gathered buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labs.kit.errors import require

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def bus_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw: what the busiest link carries per byte of the buffer; 0 for one rank's all-reduce."""
    require(op in FACTORS, f"collective must be one of {', '.join(FACTORS)}, not {op!r}")
    require(ranks >= 1, f"ranks must be at least 1, not {ranks}")
    return FACTORS[op](ranks)


def algbw_b_s(bytes: float, seconds: float) -> float:
    """Return the algorithm bandwidth: size / time, in byte/s. It falls with the number of ranks on any hardware."""
    return bytes / seconds


def busbw_b_s(bytes: float, seconds: float, ranks: int, op: str = "all_reduce") -> float:
    """Return the bus bandwidth in byte/s: comparable with a link's speed for any number of ranks."""
    return algbw_b_s(bytes, seconds) * bus_factor(op, ranks)


@dataclass(frozen=True)
class LatencyBandwidth:
    """Time of a message: `latency_s + bytes / b_s` (Hockney 1994)."""

    latency_s: float
    b_s: float

    def seconds(self, bytes: float) -> float:
        """Return the modelled time of a message of `bytes`."""
        return self.latency_s + bytes / self.b_s

    @property
    def half_bytes(self) -> float:
        """Message size that reaches half of the bandwidth: latency x bandwidth; inf if that wasn't found."""
        return self.latency_s * self.b_s if self.latency_s else 0.0


def fit(bytes: Sequence[float], seconds: Sequence[float]) -> LatencyBandwidth:
    """Fit by least squares of relative errors, so that small messages count as much as big ones; both terms >= 0.

    Needs two different sizes. If noise hides the cost per byte, the bandwidth is inf. A time of 0, from too coarse a
    clock, counts as a nanosecond.
    """
    require(len(set(bytes)) >= 2, "a latency-bandwidth fit needs at least two message sizes")
    import numpy as np
    from scipy.optimize import nnls

    t = np.maximum(np.asarray(seconds, dtype=float), 1e-9)
    a = np.column_stack([np.ones(len(t)), np.asarray(bytes, dtype=float)]) / t[:, None]
    scale = np.linalg.norm(a, axis=0)  # seconds and bytes differ by many powers of ten
    (latency, per_byte), _ = nnls(a / scale, np.ones(len(t)))
    latency, per_byte = float(latency / scale[0]), float(per_byte / scale[1])
    told = per_byte * max(bytes) > 1e-6 * latency  # otherwise it is rounding
    return LatencyBandwidth(latency, 1 / per_byte if told else float("inf"))
