"""Reference solutions of notebook 00."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist


def diagnose(report: dict[str, Any]) -> str:
    """The word for what is wrong with a machine, or "healthy"."""
    peak = report["published FP32 peak (TFLOP/s)"]
    if peak is not None and report["FP32 product (TFLOP/s)"] > peak:
        return "tf32"  # FP32 units cannot be faster than their peak: matrix units did it
    if report["busy before the run (%)"] > 10:
        return "busy"
    if report["device"] == "cpu" and report["ranks"] > report["usable cores"]:
        return "cores"
    if report["triad: its arrays together (MiB)"] < report["caches (MiB)"]:
        return "cache"
    calls_us = report["pass: operators"] * report["host time of an operator (µs)"]
    if calls_us > max(report["pass: arithmetic (µs)"], report["pass: memory (µs)"]):
        return "overhead"
    return "healthy"


def usable_cores(affinity: Collection[int], cpu_max: str) -> int:
    """Threads that can run all the time: the affinity's cores, cut by the quota, at least 1."""
    quota, period = cpu_max.split()
    if quota == "max":
        return len(affinity)
    return max(1, min(len(affinity), math.floor(int(quota) / int(period))))


def measured_busbw_gb_s(size_bytes: int) -> float:
    """Bus bandwidth of an all-reduce of `size_bytes`, in 10^9 byte/s; the same number on every rank."""
    buffer, ranks = torch.zeros(size_bytes // 4), dist.get_world_size()
    dist.all_reduce(buffer)  # the first one makes the connections
    seconds = []
    for _ in range(5):
        dist.barrier()  # all ranks start together
        start = time.perf_counter()
        dist.all_reduce(buffer)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return size_bytes / slowest.item() * 2 * (ranks - 1) / ranks / 1e9
