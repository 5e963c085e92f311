"""Measurements of a training script. Each costs the seconds that it takes.

All ranks take part. A measurement returns {what: number}, for rank 0 unless it says otherwise, and doesn't know the
fault. DDP rejects hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile, record_function

from labs.kit import measure
from labs.kit.rank import Rank
from labs.slow_training import script

Findings = dict[str, float]
WARM = 3
PARTS = ("data", "forward", "backward", "optimizer")


class Training:
    """A training script that runs step by step. `replaced` holds other objects for some names that it uses."""

    def __init__(self, text: str, rank: Rank, seed: int, folder: Path, **replaced: Any) -> None:
        names = vars(script) | replaced
        exec(compile(text, "<train>", "exec"), names)
        self.steps_of = names["train"](rank.rank, rank.world_size, seed, folder)
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.batch = 0
        self.settings = _settings()

    def go(self, steps: int = 1) -> None:
        """Take steps under this script's own settings of the process: threads, dtype and anomaly detection."""
        before = _settings()
        _set(self.settings)
        try:
            for _ in range(steps):
                start = time.perf_counter()
                loss, self.batch = next(self.steps_of)
                self.seconds.append(time.perf_counter() - start)
                self.losses.append(loss)
        finally:
            self.settings = _settings()
            _set(before)


def _settings() -> tuple[int, torch.dtype, bool]:
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_anomaly_enabled()


def _set(settings: tuple[int, torch.dtype, bool]) -> None:
    if torch.get_num_threads() != settings[0]:
        torch.set_num_threads(settings[0])
    torch.set_default_dtype(settings[1])
    torch.autograd.set_detect_anomaly(settings[2])


Make = Callable[..., Training]


def shares(make: Make, rank: Rank, n: int) -> Findings:
    """Return each part's share of rank 0's step; `other` is the rest."""
    spent: Counter[str] = Counter()

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        spent[name] += time.perf_counter() - start

    training = make(part=part)
    training.go(WARM)
    spent.clear()
    training.go(n)
    step_s = sum(training.seconds[WARM:])
    found = {name: spent[name] / step_s for name in PARTS}
    return found | {"other": 1 - sum(found.values())}


def operators(make: Make, rank: Rank, n: int) -> Findings:
    """Return the five operators with the most self time, as shares of all, and forward passes per backward pass."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    training = make()
    training.go(WARM)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        training.go(max(2, n // 4))
    rows = [e for e in prof.key_averages() if e.key.startswith(("aten::", "c10d::", "Optimizer"))]
    total = sum(e.self_cpu_time_total for e in rows)
    largest = sorted(rows, key=lambda e: -e.self_cpu_time_total)[:5]
    calls = {e.key: e.count for e in rows}
    passes = calls.get("aten::convolution", 0) / max(1, calls.get("aten::convolution_backward", 0))
    return {e.key: e.self_cpu_time_total / total for e in largest} | {"forward passes per backward pass": passes}


def memory(make: Make, rank: Rank, n: int) -> Findings:
    """Return MB of tensors that a step leaves behind: the median growth from step end to step end, from a trace."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler prints its start and stop
    training = make()
    training.go(WARM)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for _ in range(n):
            with record_function("step"):
                training.go()
    with tempfile.TemporaryDirectory() as folder:
        prof.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "step" and e["ph"] == "X")
    allocated = sorted((e["ts"], e["args"]["Total Allocated"]) for e in events if e["name"] == "[memory]")
    levels = [max(row for row in allocated if row[0] <= end)[1] for end in ends]
    return {"MB left behind per step": statistics.median(b - a for a, b in itertools.pairwise(levels)) / 1e6}


def files(make: Make, rank: Rank, n: int) -> Findings:
    """Return MB that rank 0 writes per step to files and connections, as Linux counts them; elsewhere -1."""
    training = make()
    training.go(WARM)
    before = _written()
    training.go(n)
    return {"MB written per step, files and connections": -1.0 if before < 0 else (_written() - before) / 1e6 / n}


def _written() -> float:
    counters = getattr(psutil.Process(), "io_counters", lambda: None)()
    return getattr(counters, "write_chars", -1)


def exchange(make: Make, rank: Rank, n: int) -> Findings:
    """Return gradient buckets that DDP sends per step, and other all-reduces per step."""
    buckets, others = [], []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(1)
        return allreduce_hook(dist.group.WORLD, bucket)

    training = make(DDP=lambda module, **options: _hooked(module, hook, options))
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others.append(1)
        return real(tensor, *args, **kwargs)

    training.go(WARM)
    buckets.clear()
    dist.all_reduce = counted
    try:
        training.go(n)
    finally:
        dist.all_reduce = real
    return {"buckets per step": len(buckets) / n, "other all-reduces per step": (len(others) - len(buckets)) / n}


def arrivals(make: Make, rank: Rank, n: int) -> Findings:
    """Return how much later than the first rank each one hands over its last gradients, as a share of a step."""
    came = [0.0]

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        came[0] = time.perf_counter()  # the ranks of one machine share this clock
        return allreduce_hook(dist.group.WORLD, bucket)

    training = make(DDP=lambda module, **options: _hooked(module, hook, options))
    training.go(WARM)
    moments = []
    for _ in range(n):
        training.go()
        moments.append(came[0])
    step_s = statistics.median(training.seconds[WARM:])
    late = [[t - min(ts) for t in ts] for ts in zip(*rank.gather(moments), strict=True)]
    return {f"rank {r} late": statistics.median(row[r] for row in late) / step_s for r in range(rank.world_size)}


def _hooked(module: torch.nn.Module, hook: Callable, options: dict[str, Any]) -> torch.nn.Module:
    wrapped = script.DDP(module, **options)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def settings(make: Make, rank: Rank, n: int) -> Findings:
    """Return bits of a new tensor, whether anomaly detection is on, threads, and images in a batch."""
    training = make()
    training.go(1)
    threads, dtype, anomaly = training.settings
    bits = torch.finfo(dtype).bits
    return {"bits of a new tensor": bits, "anomaly detection": float(anomaly), "threads": threads,
            "images per step and rank": training.batch}  # fmt: skip


MEASUREMENTS: dict[str, Callable[[Make, Rank, int], Findings]] = {
    f.__name__: f for f in (shares, operators, memory, files, exchange, arrivals, settings)
}


def in_turn(a: Training, b: Training, rank: Rank, rounds: int) -> list[float]:
    """Return a's seconds per image over b's, one ratio per round of two steps each; the slowest rank counts."""
    for training in (a, b):
        training.go(WARM)
    steps = {"a": lambda: a.go(2), "b": lambda: b.go(2)}
    seconds = measure.interleave(steps, rounds, rank.device, between=rank.barrier)
    slow_a, slow_b = (rank.slowest(seconds[name]) for name in steps)
    return [(x / a.batch) / (y / b.batch) for x, y in zip(slow_a, slow_b, strict=True)]
