"""Closed forms of data parallelism: bytes moved, speed-up, Amdahl's fit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def ring_all_reduce_bytes(size: int, ranks: int) -> float:
    """Bytes each rank sends in a ring all-reduce of `size` bytes: 2 (n-1)/n S.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms"; also NVIDIA/nccl-tests
    doc/PERFORMANCE.md, where the same factor turns algbw into busbw.
    """
    return 2 * (ranks - 1) / ranks * size


def data_parallel_bytes(parameters: int, buffers: int, inputs: int, outputs: int, ranks: int) -> dict[str, float]:
    """Bytes that pass device 0 per step of `nn.DataParallel` on `ranks` devices, by phase.

    `parameters`, `buffers`, `inputs` and `outputs` are the bytes of the module's own and of the whole batch's.
    Replicas are made anew at every forward, so parameters and buffers travel out, gradients travel back.
    """
    others = ranks - 1
    return {
        "replicate": others * (parameters + buffers),
        "scatter": others / ranks * inputs,
        "gather": others / ranks * outputs,
        "scatter gradients": others / ranks * outputs,
        "reduce gradients": others * parameters,
    }


@dataclass(frozen=True)
class Amdahl:
    """T(n) = serial + parallel / n, both in the unit of the times it was fitted to."""

    serial: float
    parallel: float

    def time(self, ranks: float) -> float:
        """T(n)."""
        return self.serial + self.parallel / ranks

    def speedup(self, ranks: float) -> float:
        """T(1) / T(n)."""
        return self.time(1) / self.time(ranks) if self.time(ranks) else 1.0

    @property
    def limit(self) -> float:
        """Speed-up with infinitely many devices; inf without a serial part."""
        return math.inf if self.serial <= 0 else self.time(1) / self.serial


def fit_amdahl(ranks: Sequence[int], times: Sequence[float]) -> Amdahl:
    """Least squares fit of T(n) = s + p/n, neither part negative. Needs two different n; ValueError otherwise.

    T(n) = p/n + 2c(n-1)/n, a ring all-reduce of cost c without overlap, has the same form with s = 2c: times
    alone cannot tell a serial part from communication.
    """
    if len(set(ranks)) < 2:
        raise ValueError(f"times of at least two different numbers of ranks are needed, not {list(ranks)}")
    from scipy.optimize import nnls

    design = np.stack([np.ones(len(ranks)), 1 / np.asarray(ranks, float)], axis=1)
    serial, parallel = nnls(design, np.asarray(times, float))[0]
    return Amdahl(float(serial), float(parallel))
