"""The same training step for real, to check the trace against an allocator.

Nothing here uses the tracker. On a CPU it uses the profiler's list of allocations and releases, on a GPU the
allocator's peak.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labs.common.memory.recomputation import recompute
from labs.common.models import Workload
from labs.common.oracle import fake
from labs.common.oracle.internals import only_calls_others
from labs.common.oracle.step import Conditions, no_collection
from labs.common.precision import amp

SECOND = "second step"


@dataclass(frozen=True)
class Measured:
    """Peak bytes of a real training step."""

    peak_bytes: int
    """Bytes requested from the allocator. A GPU's allocator hands out more, in blocks, and reserves still more: see
    below.
    """
    tensor_bytes: int | None
    """Without kernel workspace, which a kernel allocates and frees within its call. None on a GPU."""
    allocated_bytes: int | None = None
    """On a GPU: peak of allocated blocks, including remainders too small to split off."""
    reserved_bytes: int | None = None
    """On a GPU: peak of memory that the allocator reserved from the driver for the whole process."""


def measured(source: fake.Source, rows: int, device: torch.device | None = None, **conditions: Any) -> Measured:
    """Run the second training step for real on `device`; `conditions` as in labs.common.oracle.step.

    The model is a copy, so that its parameters count and `source` keeps its own. It takes real memory and time, so use
    it for small models. On a CPU, sizes are as requested, without memory that libraries get elsewhere.
    """
    device = device or torch.device("cpu")
    workload = fake.real(source)
    c = Conditions(**{**conditions, "target": device.type})
    if device.type == "cuda":
        _cublas_workspace(device)  # cuBLAS keeps its workspace, which belongs to no step, so allocate it before
        gc.collect()  # a model of an earlier call, freed during this one, would reduce its peak
        before = torch.cuda.memory_stats(device)
        _steps(workload, rows, c, device, _fresh_peak(device))
        return of_allocator(before, torch.cuda.memory_stats(device))
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # stops the profiler from printing when it starts and stops
    gc.collect()  # releases of earlier work would make the profiler warn
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(workload, rows, c, device, record_function(SECOND))
    return peaks(_events(profiler))


def _steps(workload: Workload, rows: int, c: Conditions, device: torch.device, second: AbstractContextManager) -> None:
    """Run two steps, the second in the context `second`."""
    module = recompute(copy.deepcopy(workload.module).to(device), c.policy)
    optimizer, scaler = c.make_optimizer(module), amp.scaler(c.precision, device)
    parts = c.parts(*(t.to(device) for t in workload.make_batch(rows)))
    amp.train_step(module, workload.loss, parts, optimizer, c.precision, scaler, c.max_norm)
    gc.collect()  # cycles of earlier steps must not be freed in this one
    with no_collection(), second:
        amp.train_step(module, workload.loss, parts, optimizer, c.precision, scaler, c.max_norm)


def of_allocator(before: dict[str, int], after: dict[str, int]) -> Measured:
    """Return peaks of `torch.cuda.memory_stats` minus what existed before; reserved bytes unchanged."""

    def more(kind: str) -> int:
        return after[f"{kind}.all.peak"] - before[f"{kind}.all.current"]

    return Measured(more("requested_bytes"), None, more("allocated_bytes"), after["reserved_bytes.all.peak"])


def _cublas_workspace(device: torch.device) -> None:
    """Make cuBLAS allocate its workspace, once in this thread and once in autograd's, which has its own handle."""
    x = torch.ones(8, 8, device=device, requires_grad=True)
    (x @ x).sum().backward()


@contextmanager
def _fresh_peak(device: torch.device) -> Iterator[None]:
    torch.cuda.reset_peak_memory_stats(device)
    yield


def _events(profiler: profile) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


@dataclass
class Block:
    """Memory that the allocator handed out while the profiler ran."""

    nbytes: int
    start: float
    calls: tuple[int, ...]
    """Event numbers of the operations running at its allocation, outermost first."""
    end: float = math.inf
    within: str = ""
    """The innermost operation running both at its allocation and at its release."""


def peaks(events: list[dict]) -> Measured:
    """Return peaks during the second step, from a profiler that started before the first step.

    Blocks allocated before that and released in the meantime don't count.
    """
    step = next(e for e in events if e.get("name") == SECOND)
    until, found = step["ts"] + step["dur"], list(blocks(events))
    kept = [b for b in found if not is_kernel(b.within)]
    return Measured(*(_peak(which, step["ts"], until) for which in (found, kept)))


def _peak(found: list[Block], start: float, end: float) -> int:
    """Return the most bytes at once between two times."""
    live = most = 0
    for ts, change in sorted([(b.start, b.nbytes) for b in found] + [(b.end, -b.nbytes) for b in found]):
        live += change
        most = max(most, live) if start <= ts <= end else most
    return most


def blocks(events: list[dict]) -> Iterator[Block]:
    """Yield all allocated blocks, in order of their ends."""
    live: dict[int, Block] = {}  # by address
    running: list[int] = []
    for ts, what, i in _order(events):
        if what == "enter":
            running.append(i)
        elif what == "leave":
            running.remove(i)
        elif (nbytes := events[i]["args"]["Bytes"]) > 0:
            live[events[i]["args"]["Addr"]] = Block(nbytes, ts, tuple(running))
        elif block := live.pop(events[i]["args"]["Addr"], None):
            both = [c for c in block.calls if c in running]
            block.end, block.within = ts, events[both[-1]]["name"] if both else ""
            yield block
    yield from live.values()


def _order(events: list[dict]) -> list[tuple[float, str, int]]:
    """Return (time, "enter" or "leave" an operation, or "memory", event number), in order of time."""
    found = []
    for i, e in enumerate(events):
        if e.get("name") == "[memory]":
            found.append((e["ts"], "memory", i))
        elif e.get("cat") == "cpu_op":
            found += [(e["ts"], "enter", i), (e["ts"] + e["dur"], "leave", i)]
    return sorted(found, key=lambda f: (f[0], ("enter", "memory", "leave").index(f[1])))


@functools.cache
def is_kernel(op: str) -> bool:
    """Return whether an operation ("aten::add") does its work itself, unlike "aten::linear", which calls others."""
    return op.startswith("aten::") and not only_calls_others(op)
