"""Where the time of a step goes: shares from a trace of torch.profiler, for a rank on a CPU core or on a GPU.

Each moment of a step belongs to one share. A CPU rank is judged by its main thread, a GPU rank by its GPU: what the
host does counts there only while the GPU has nothing to run.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.common.profiling.intervals import Span, both, length, minus, union
from labs.common.profiling.traces import Trace
from labs.kit.errors import BadInput, require

RANGES = ("data", "host-to-device", "forward", "backward", "optimizer")
"""Names of the record_function ranges of a step."""
SHARES = ("data", "host-to-device", "forward", "backward", "exposed communication", "optimizer", "overhead", "idle")
"""Idle is a GPU's: nothing to run while the host is in forward, backward or optimizer. A CPU rank is its own host."""
STEP = "ProfilerStep#"
COLLECTIVE = ("gloo:", "nccl:")
NOT_COMPUTING = ("c10d::", "record_param_comms", *COLLECTIVE)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """One bar of a trace; times in s on the trace's clock."""

    name: str
    kind: str
    """Chrome's "cat": user_annotation, cpu_op, cuda_runtime, kernel, gpu_memcpy, ..."""
    start: float
    end: float
    thread: int = 0
    correlation: int | None = None
    """Number that a GPU's kernel shares with the call that launched it."""

    @property
    def span(self) -> Span:
        """(start, end)."""
        return self.start, self.end


def read(path: str | Path) -> list[Event]:
    """All bars of the Chrome trace at `path`, by start. BadInput if it is none."""
    try:
        bars = [_event(event) for event in Trace(path).events() if event.get("ph") == "X"]
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path} is no trace of torch.profiler ({type(e).__name__}: {e})") from None
    bars = [e for e in bars if math.isfinite(e.start) and e.start <= e.end < math.inf]
    require(bool(bars), f"{path} is no trace of torch.profiler with operations in it: profile some steps")
    return sorted(bars, key=lambda e: e.start)


def _event(row: dict[str, Any]) -> Event:
    start, args, thread = 1e-6 * float(row["ts"]), row.get("args"), row.get("tid", 0)
    shared = args.get("correlation") if isinstance(args, dict) else None
    return Event(
        str(row["name"]),
        str(row.get("cat") or ""),
        start,
        start + 1e-6 * float(row.get("dur", 0)),
        thread if isinstance(thread, int) else 0,
        shared if isinstance(shared, int) else None,
    )


def steps(events: Sequence[Event]) -> list[Event]:
    """The steps that `prof.step()` has cut the trace into."""
    return [e for e in events if e.name.startswith(STEP) and e.kind == "user_annotation"]


def of_steps(events: Sequence[Event]) -> list[dict[str, float]]:
    """Seconds of each share, step by step. BadInput if the trace has no steps."""
    found = steps(events)
    if not found:
        raise BadInput("the trace has no steps: give torch.profiler a schedule and call its step() after each one")
    of_a_step = on_gpu if any(e.kind in ON_GPU for e in events) else on_core
    inside: list[list[Event]] = [[] for _ in found]
    starts = [s.start for s in found]
    for e in events:  # a bar may reach from one step into the next
        for i in range(max(0, bisect.bisect_right(starts, e.start) - 1), bisect.bisect_left(starts, e.end)):
            inside[i].append(e)
    launched = _launched_in(events, {s.thread for s in found})
    return [of_a_step(own, step, launched) for own, step in zip(inside, found, strict=True)]


def _launched_in(events: Sequence[Event], threads: Container[int]) -> dict[int, str]:
    """{correlation: the range of a main thread that made this call}, of all steps: a GPU may be steps behind its host.

    A call outside of the ranges counts as overhead.
    """
    own = {
        name: union(e.span for e in events if e.name == name and e.kind == "user_annotation" and e.thread in threads)
        for name in RANGES
    }

    def at(moment: float) -> str:
        for name, spans in own.items():
            i = bisect.bisect_right(spans, (moment, float("inf"))) - 1
            if i >= 0 and moment < spans[i][1]:
                return name
        return "overhead"

    return {e.correlation: at(e.start) for e in events if e.kind.startswith("cuda_") and e.correlation is not None}


def on_core(events: Sequence[Event], step: Event, launched: object = None) -> dict[str, float]:
    """Seconds of each share of one step of a CPU rank, whose device is its main thread.

    Exposed communication: a collective is under way, and the main thread runs no operation, outside of data.
    """
    ranges = _ranges(events, step)
    main = [e for e in events if e.thread == step.thread and e.kind == "cpu_op"]
    computing = union(e.span for e in main if not e.name.startswith(NOT_COMPUTING))
    exposed = minus(both(_under_way(events), [step.span]), union([*computing, *ranges["data"]]))
    found = dict.fromkeys(SHARES[:-1], 0.0)
    for name, spans in ranges.items():
        found[name] = length(minus(spans, exposed))
    found["exposed communication"] = length(exposed)
    named = union([*exposed, *(s for spans in ranges.values() for s in spans)])
    found["overhead"] = length(minus([step.span], named))
    return found


def _under_way(events: Iterable[Event]) -> list[Span]:
    """When collectives were under way: from the call on, if each can be found, to the end in gloo's thread."""
    done = sorted((e for e in events if e.name.startswith(COLLECTIVE)), key=lambda e: e.start)
    called = sorted(e.start for e in events if e.name.startswith("c10d::") and e.kind == "cpu_op")
    if len(called) != len(done):
        called = [e.start for e in done]
    return union((min(start, e.start), e.end) for start, e in zip(called, done, strict=True))


def on_gpu(events: Sequence[Event], step: Event, launched: Mapping[int | None, str]) -> dict[str, float]:
    """Seconds of each share of one step of a GPU rank, whose device is the GPU.

    While kernels compute, theirs is the range that launched them, be it in an earlier step; otherwise a copy to the
    device, otherwise NCCL, which is then exposed. While nothing runs: data and host-to-device if the host is there,
    overhead if it is in no range, else idle: the host is in forward, backward or optimizer and has not launched the
    next kernel yet.
    """
    ranges = _ranges(events, step)
    runs: dict[str, list[Span]] = {
        name: []
        for name in ("forward", "backward", "optimizer", "data", "overhead", "host-to-device", "exposed communication")
    }
    for e in events:
        if e.kind == "kernel" and "nccl" in e.name.lower():
            runs["exposed communication"].append(e.span)
        elif e.kind == "gpu_memcpy" and "HtoD" in e.name:
            runs["host-to-device"].append(e.span)
        elif e.kind in ON_GPU:
            at = launched.get(e.correlation)
            if at is None:  # its call is not in the trace: where the host is when it begins
                at = next((n for n, spans in ranges.items() if any(a <= e.start < b for a, b in spans)), "overhead")
            runs[at].append(e.span)
    found, left = dict.fromkeys(SHARES, 0.0), [step.span]
    for name, spans in runs.items():  # in this order: what computes hides what is copied and exchanged
        found[name] += length(both(left, union(spans)))
        left = minus(left, union(spans))
    for name in ("data", "host-to-device"):
        found[name] += length(both(left, ranges[name]))
        left = minus(left, ranges[name])
    waiting = both(left, union(s for spans in ranges.values() for s in spans))
    found["idle"] = length(waiting)
    found["overhead"] += length(minus(left, waiting))
    return found


def _ranges(events: Iterable[Event], step: Event) -> dict[str, list[Span]]:
    """Spans of each of RANGES on the main thread, inside of `step`."""
    own = [e for e in events if e.thread == step.thread and e.kind == "user_annotation"]
    return {name: both(union(e.span for e in own if e.name == name), [step.span]) for name in RANGES}
