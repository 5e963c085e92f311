"""The same training step for real: what an allocator says, to prove the trace on.

Nothing here uses the tracker: on a CPU the profiler's list of what torch's allocator handed out and took back, on a
GPU the allocator's own peak.
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
    """All that the allocator was asked for. On a GPU it hands out more, in blocks, and takes still more: see below."""
    tensor_bytes: int | None
    """Without kernels' workspace: what one kernel takes and gives back within its call. None on a GPU."""
    allocated_bytes: int | None = None
    """On a GPU: peak of the blocks handed out, each with the end that was too small to be split off."""
    reserved_bytes: int | None = None
    """On a GPU: peak of what the allocator took from the driver, for all that this process has there."""


def measured(source: fake.Source, rows: int, device: torch.device | None = None, **conditions: Any) -> Measured:
    """The second training step, really run; `conditions` as labs.common.oracle.step takes them, the target is `device`.

    The model is a copy, so that its parameters count, and `source` keeps its own. It takes real memory and time: for
    small models. On a CPU sizes are as asked for, and memory that libraries get elsewhere is not seen.
    """
    device = device or torch.device("cpu")
    workload = fake.real(source)
    c = Conditions(**{**conditions, "target": device.type})
    if device.type == "cuda":
        _cublas_workspace(device)  # it stays, and belongs to no step: it must be there before
        gc.collect()  # a model of an earlier call that goes during this one would be taken off its peak
        before = torch.cuda.memory_stats(device)
        _steps(workload, rows, c, device, _fresh_peak(device))
        return of_allocator(before, torch.cuda.memory_stats(device))
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would print its start and its stop
    gc.collect()  # what is left of earlier work must not come back meanwhile: the profiler would warn
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _steps(workload, rows, c, device, record_function(SECOND))
    return peaks(_events(profiler))


def _steps(workload: Workload, rows: int, c: Conditions, device: torch.device, second: AbstractContextManager) -> None:
    """Two steps; the second in the context `second`."""
    module = recompute(copy.deepcopy(workload.module).to(device), c.policy)
    optimizer, scaler = c.make_optimizer(module), amp.scaler(c.precision, device)
    parts = c.parts(*(t.to(device) for t in workload.make_batch(rows)))
    amp.train_step(module, workload.loss, parts, optimizer, c.precision, scaler, c.max_norm)
    gc.collect()  # what is in cycles of earlier steps must not come back in this one
    with no_collection(), second:
        amp.train_step(module, workload.loss, parts, optimizer, c.precision, scaler, c.max_norm)


def of_allocator(before: dict[str, int], after: dict[str, int]) -> Measured:
    """Peaks that `torch.cuda.memory_stats` tells, less what was there before; reserved bytes as they are."""

    def more(kind: str) -> int:
        return after[f"{kind}.all.peak"] - before[f"{kind}.all.current"]

    return Measured(more("requested_bytes"), None, more("allocated_bytes"), after["reserved_bytes.all.peak"])


def _cublas_workspace(device: torch.device) -> None:
    """Have cuBLAS take its workspace, once in this thread and once in autograd's, which has a handle of its own."""
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
    """Operations that were running when it was handed out, the outermost first: numbers of events."""
    end: float = math.inf
    within: str = ""
    """The innermost operation that was running both then and when it was given back."""


def peaks(events: list[dict]) -> Measured:
    """Peaks during the second step, from the events of a profiler that ran from before the first.

    Blocks that were handed out earlier still, and come back meanwhile, do not count.
    """
    step = next(e for e in events if e.get("name") == SECOND)
    until, found = step["ts"] + step["dur"], list(blocks(events))
    kept = [b for b in found if not is_kernel(b.within)]
    return Measured(*(_peak(which, step["ts"], until) for which in (found, kept)))


def _peak(found: list[Block], start: float, end: float) -> int:
    """Most bytes at once between two times."""
    live = most = 0
    for ts, change in sorted([(b.start, b.nbytes) for b in found] + [(b.end, -b.nbytes) for b in found]):
        live += change
        most = max(most, live) if start <= ts <= end else most
    return most


def blocks(events: list[dict]) -> Iterator[Block]:
    """All blocks that were handed out, in order of their ends."""
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
    """(time, "enter" or "leave" an operation, or "memory", number of the event), in order of time."""
    found = []
    for i, e in enumerate(events):
        if e.get("name") == "[memory]":
            found.append((e["ts"], "memory", i))
        elif e.get("cat") == "cpu_op":
            found += [(e["ts"], "enter", i), (e["ts"] + e["dur"], "leave", i)]
    return sorted(found, key=lambda f: (f[0], ("enter", "memory", "leave").index(f[1])))


@functools.cache
def is_kernel(op: str) -> bool:
    """Whether "aten::add", say, does its work itself; those that only call others do not ("aten::linear")."""
    return op.startswith("aten::") and not only_calls_others(op)
