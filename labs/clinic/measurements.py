"""What can be measured of a patient. Each measurement is bought: its price is the time that it takes.

Every rank takes part in each. A measurement returns findings, {name: number}, of rank 0 where it does not say
otherwise: a profiler on one rank sees no other. Nothing here knows which illness there is.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import copy
import ctypes
import functools
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader

from labs.clinic.patients import Patient, patients
from labs.common.data_parallel.wire import tcp_sent_bytes
from labs.common.profiling import shares as trace_shares
from labs.kit import measure
from labs.kit.rank import Rank

Findings = dict[str, float]
Admit = Callable[..., Patient]
"""Makes another training of the same patient, with instruments."""
WARM, STEPS = 3, 16


class Exchange:
    """DDP that notes when each bucket of gradients is handed over, and its bytes."""

    def __init__(self) -> None:
        self.handed_over, self.buckets, self.bytes = 0.0, 0, 0
        self.calling = False
        """Whether a collective that is called now is one of DDP's buckets."""

    def ddp(self, module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """In place of DistributedDataParallel."""
        wrapped = DistributedDataParallel(module, **options)
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def _hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.handed_over = time.perf_counter()
        self.buckets += 1
        self.bytes += bucket.buffer().nbytes
        self.calling = True
        try:
            return allreduce_hook(dist.group.WORLD, bucket)
        finally:
            self.calling = False


def steps(admit: Admit, rank: Rank, n: int) -> Findings:
    """Seconds of a step on each rank, and how many times longer the last third takes than the first."""
    with patients(admit()) as (p,):
        p.go(WARM + n)
        mine = p.steps[WARM:]
        third = max(1, n // 3)
        growth = statistics.median(mine[-third:]) / statistics.median(mine[:third])
        every = rank.gather((statistics.median(mine), growth, p.batch))
    found = {f"step_s of rank {r}": s for r, (s, _, _) in enumerate(every)}
    return found | {"growth": min(g for _, g, _ in every), "us per sample": 1e6 * every[0][0] / every[0][2]}


def shares(admit: Admit, rank: Rank, n: int) -> Findings:
    """Share of each part in rank 0's step, from a trace of torch.profiler: medians, scaled to sum to 1."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints its start and its stop
    folders, quiet = tempfile.TemporaryDirectory(), warnings.catch_warnings()
    with folders as folder, quiet, patients(admit(part=record_function)) as (p,):
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # which is wanted here
        p.go(WARM)
        trace = Path(folder) / "trace.json"
        plan = schedule(wait=0, warmup=1, active=n)
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=plan,
            on_trace_ready=lambda done: done.export_chrome_trace(str(trace)),
        ) as profiler:
            for _ in range(1 + n):
                p.go()
                profiler.step()
        rows = trace_shares.of_steps(trace_shares.read(trace))
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return rank.gather({name: s / (sum(middle.values()) or 1.0) for name, s in middle.items()})[0]


def ops(admit: Admit, rank: Rank, n: int) -> Findings:
    """Shares of operators in rank 0's own operator time, the largest six; forward and backward convolutions a step."""
    with patients(admit()) as (p,):
        p.go(WARM)
        count = max(2, n // 4)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            p.go(count)
    rows = [(e.key, e.self_cpu_time_total, e.count) for e in profiler.key_averages()]
    own = [(k, s, c) for k, s, c in rows if k.startswith(("aten::", "Optimizer"))]
    total = sum(s for _, s, _ in own) or 1.0
    calls: Counter[str] = Counter()
    for key, _, c in rows:
        calls[key] += c
    forward, backward = calls["aten::convolution"], calls["aten::convolution_backward"] or 1
    found = {f"share of {k}": s / total for k, s, _ in sorted(own, key=lambda row: -row[1])[:6]}
    return rank.gather(found | {"forwards per backward": forward / backward})[0]


def memory(admit: Admit, rank: Rank, n: int) -> Findings:
    """Bytes that rank 0 holds: at the end, and by how much they grow in a step."""
    seen = []
    with patients(admit()) as (p,):
        p.go(2 * WARM)
        for _ in range(n):
            p.go()
            seen.append(held_bytes())
    growth = statistics.median(b - a for a, b in itertools.pairwise(seen))
    resident = psutil.Process().memory_info().rss
    return rank.gather({"resident MB": resident / 1e6, "growth MB per step": growth / 1e6})[0]


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of malloc.h (glibc 2.33 and later)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def held_bytes() -> int:
    """Bytes in use by this process as its allocator counts them; freed memory that it keeps is not among them.

    Where the allocator does not tell, resident memory, which hides what grows into memory that was freed before.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return psutil.Process().memory_info().rss
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def arrivals(admit: Admit, rank: Rank, n: int) -> Findings:
    """How much later than the first rank each rank hands over its last gradients, as a share of a step.

    The ranks of one machine share its clock (CLOCK_MONOTONIC).
    """
    watch, mine = Exchange(), []
    with patients(admit(DistributedDataParallel=watch.ddp)) as (p,):
        p.go(WARM)
        for _ in range(n):
            p.go()
            mine.append(watch.handed_over)
        length = statistics.median(p.steps[WARM:])
    every = rank.gather((mine, length))
    step_s = statistics.median(s for _, s in every)
    late = [[t - min(ts) for t in ts] for ts in zip(*(m for m, _ in every), strict=True)]
    return {f"rank {r} late": statistics.median(row[r] for row in late) / step_s for r in range(rank.world_size)}


def cores(admit: Admit, rank: Rank, n: int) -> Findings:
    """Threads against cores, what `top` says, and the step's time over that with a thread for each core, in turn."""
    with patients(admit(), admit()) as (p, q):
        p.go(WARM)
        q.go(WARM)
        threads, here = p.state[0], max(1, len(rank.cores) or torch.get_num_threads())
        q._state = (min(threads, here), *q.state[1:])
        before, start = time.process_time(), time.perf_counter()
        p.go(2)
        busy = (time.process_time() - before) / (time.perf_counter() - start)
        ratio = _in_turn(p, q, rank, n)
    found = {"threads": threads, "cores": here, "busy cores": busy, "step over one thread per core": ratio}
    return rank.gather(found)[0]


def disk(admit: Admit, rank: Rank, n: int) -> Findings:
    """Per step of rank 0: bytes that it asks the system to write and to read, fsyncs, and the time in all of it."""
    spent: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent["seconds"] += time.perf_counter() - start  # type: ignore[assignment]
                spent[name] += 1

        return call

    with (
        mock.patch.object(os, "fsync", timed("fsyncs", os.fsync)),
        mock.patch.object(torch, "save", timed("saves", torch.save)),
        mock.patch.object(np, "load", timed("loads", np.load)),
        patients(admit()) as (p,),
    ):
        p.go(WARM)
        spent.clear()
        before, start = _io(), time.perf_counter()
        p.go(n)
        after, seconds = _io(), time.perf_counter() - start
    found = {
        f"{name} bytes per step": max(0.0, (b - a) / n)
        for name, a, b in zip(("read", "written"), before, after, strict=True)
    }
    found |= {"fsyncs per step": spent["fsyncs"] / n, "share of waiting": spent["seconds"] / seconds}
    return rank.gather(found)[0]


def _io() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls; what went to TCP is taken off again (Linux)."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return 0, 0
    values = dict(line.split(": ") for line in text.splitlines())
    return int(values["rchar"]), int(values["wchar"]) - (tcp_sent_bytes() or 0)


def census(admit: Admit, rank: Rank, n: int) -> Findings:
    """Formats and settings; and what forward and backward cost beside a plain copy in float32, in turn."""
    with patients(admit()) as (p,):
        p.go(WARM)
        module, step_s = p.models[0], statistics.median(p.steps[1:])
        _, default, anomaly = p.state
        wide = sum(v.numel() for v in module.parameters() if v.dtype == torch.float64)
        total = sum(v.numel() for v in module.parameters())
        x, y = torch.randn(p.batch, 1, 28, 28), torch.zeros(p.batch, dtype=torch.int64)

        def local(dtype: torch.dtype, checked: bool) -> Callable[[], None]:
            own, inputs = copy.deepcopy(module).to(dtype), x.to(dtype)

            def once() -> None:
                with torch.autograd.set_detect_anomaly(checked):
                    cross_entropy(own(inputs), y).backward()

            return once

        # A synchronised BatchNorm communicates in here, too: all ranks take the same calls in the same order
        both = {"as is": local(default, anomaly), "plain": local(torch.float32, False)}
        for call in both.values():
            call()
        seconds = measure.interleave(both, max(3, n // 2), rank.device)
    as_is, plain = (statistics.median(seconds[name]) for name in both)
    found = {
        "float64 share of parameters": wide / total,
        "anomaly detection": float(anomaly),
        "batch": p.batch,
        "default is float64": float(default == torch.float64),
        "share of step saved if plain": max(0.0, as_is - plain) / step_s,
    }
    return rank.gather(found)[0]


def traffic(admit: Admit, rank: Rank, n: int) -> Findings:
    """Per step of rank 0: DDP's buckets, other collectives, bytes of both against the parameters', time of the latter.

    And the step's time over that with DDP's own choice of buckets, and without the other collectives, in turn.
    """
    watch, others, real = Exchange(), Counter(), dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        done = real(tensor, *args, **kwargs)
        if not watch.calling:
            others.update(calls=1, bytes=tensor.nbytes, seconds=time.perf_counter() - start)
        return done

    with mock.patch.object(dist, "all_reduce", all_reduce), patients(admit(DistributedDataParallel=watch.ddp)) as (p,):
        p.go(WARM)
        others.clear()
        watch.buckets = watch.bytes = 0
        p.go(n)
        step_s = sum(p.steps[WARM:])
        size = sum(v.nbytes for v in p.models[0].parameters())
    found = {
        "buckets per step": watch.buckets / n,
        "other collectives per step": others["calls"] / n,
        "bytes over parameters": (watch.bytes + others["bytes"]) / n / size,
        "share of other collectives": others["seconds"] / step_s,
    }
    with patients(admit(), admit(DistributedDataParallel=default_buckets)) as (p, q):
        found["step over default buckets"] = _in_turn(p, q, rank, n)
    if others["calls"]:
        with patients(admit(), admit()) as (p, q):
            q.go = functools.partial(_silenced, q.go)  # type: ignore[method-assign]
            found["step over one without other collectives"] = _in_turn(p, q, rank, n)
    return rank.gather(found)[0]


def _silenced(go: Callable[[int], None], steps: int = 1) -> None:
    """Steps whose collectives do nothing, but for those of DDP, which are not called from Python."""
    with mock.patch.object(dist, "all_reduce", lambda *args, **kwargs: None):
        go(steps)


def default_buckets(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """DDP with buckets of its own choice."""
    return DistributedDataParallel(module, **{k: v for k, v in options.items() if k != "bucket_cap_mb"})


class OneBatch(DataLoader):
    """A loader that gives its first batch again and again: what training costs if data cost nothing."""

    kept: Any = None

    def __iter__(self) -> Iterator[Any]:
        if self.kept is None:
            self.kept = next(super().__iter__())
        for _ in range(len(self)):
            yield self.kept


class LargeBatches(DataLoader):
    """A loader of batches four times as large."""

    def __init__(self, dataset: Any, batch_size: int, **options: Any) -> None:
        super().__init__(dataset, 4 * batch_size, **options)


class Alone(torch.nn.Module):
    """In place of DDP: no gradient is exchanged."""

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the module."""
        return self.module(x)


def same_batch(admit: Admit, rank: Rank, n: int) -> Findings:
    """The step's time over that of steps that take the same batch again, in turn: what free data would give.

    And the share of a step in which rank 0 waits for its batch.
    """
    waits: list[float] = []

    @contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if name == "data":
            waits.append(time.perf_counter() - start)

    with patients(admit(part=part), admit(DataLoader=OneBatch)) as (p, q):
        gain = _in_turn(p, q, rank, n)
        share = statistics.median(waits) / statistics.median(p.steps)
    return rank.gather({"gain if data were free": gain, "share of waiting for data": share})[0]


def batch(admit: Admit, rank: Rank, n: int) -> Findings:
    """Samples in a batch, and samples per second of batches four times as large, over this patient's, in turn."""
    with patients(admit(), admit(DataLoader=LargeBatches)) as (p, q):
        return {"gain of a batch 4 x as large": _in_turn(p, q, rank, n // 2), "samples": p.batch}


def alone(admit: Admit, rank: Rank, n: int) -> Findings:
    """The step's time over that of steps whose gradients are not exchanged, in turn: what a free wire would give."""
    with patients(admit(), admit(DistributedDataParallel=Alone)) as (p, q):
        return {"gain if the exchange were free": _in_turn(p, q, rank, n)}


def _in_turn(p: Patient, q: Patient, rank: Rank, n: int) -> float:
    """Median of p's seconds per sample over q's; blocks of two steps in turn, the slowest rank counts."""
    return statistics.median(in_turn(p, q, rank, max(3, n // 3)))


def in_turn(p: Patient, q: Patient, rank: Rank, rounds: int | measure.Budget, block: int = 2) -> list[float]:
    """p's seconds per sample over q's, one ratio for each round."""
    for patient in (p, q):
        patient.go(WARM)
    calls = {"p": lambda: p.go(block), "q": lambda: q.go(block)}
    seconds = measure.interleave(calls, rounds, rank.device, between=rank.barrier)
    a, b = (rank.slowest(seconds[name]) for name in calls)
    return [(x / p.batch) / (y / q.batch) for x, y in zip(a, b, strict=True)]


MEASUREMENTS: dict[str, Callable[[Admit, Rank, int], Findings]] = {
    f.__name__: f
    for f in (steps, shares, ops, memory, arrivals, cores, disk, census, traffic, same_batch, batch, alone)
}
