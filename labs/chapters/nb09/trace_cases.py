"""Events of one rank's trace of one training step: recorded ones, and others that are made from seeds."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from labs.common.profiling.intervals import Span, minus, union

Event = dict[str, Any]
RECORDED = Path(__file__).with_name("one_step.json")
MAIN, GLOO, LOADER = 4100, (4117, 4118), 4203  # threads


@cache
def recorded() -> tuple[list[Event], ...]:
    """The events of both ranks of one real step; rank 1 was late in backward. What they are says `about()`."""
    return tuple(json.loads(RECORDED.read_text("utf-8"))["ranks"])


def about() -> str:
    """Where the recorded step comes from."""
    return json.loads(RECORDED.read_text("utf-8"))["about"]


def case(which: int | str) -> list[Event]:
    """Events of "rank 0" or "rank 1" of the recorded step, or made from a seed; a new list each time."""
    found = recorded()[int(which[-1])] if isinstance(which, str) else made(which)
    return [dict(e) for e in found]


def made(seed: int) -> list[Event]:
    """A step as torch.profiler writes it, in no order: two gloo threads, operators within operators, a loader."""
    draw = random.Random(seed)
    rows: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": MAIN, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": 9, "tid": MAIN, "ts": 1.0},
    ]
    start = draw.uniform(1e3, 9e5)
    now = start + draw.uniform(400, 1500)
    forward = now
    now = _operators(rows, now, draw.randint(3, 5), "aten::linear", draw)
    rows.append(_bar("forward", "user_annotation", forward, now))
    backward, ready = now, []
    for _ in range(draw.randint(3, 5)):
        now = _operators(
            rows,
            now + draw.uniform(50, 300),
            draw.randint(1, 3),
            "autograd::engine::evaluate_function: AddmmBackward0",
            draw,
        )
        rows.append(_bar("c10d::allreduce_", "cpu_op", now + 5, now + draw.uniform(200, 900)))
        ready.append(now + 20)
        now = rows[-1]["ts"] + rows[-1]["dur"]
    rows += (reduces := _all_reduces(ready, now, draw))
    end = max(e["ts"] + e["dur"] for e in reduces) + draw.uniform(30, 90)
    rows.append(_bar("backward", "user_annotation", backward, end))
    optimizer = end + draw.uniform(10, 40)
    end = _operators(rows, optimizer, 2, "Optimizer.step#SGD.step", draw)
    rows.append(_bar("optimizer", "user_annotation", optimizer, end))
    rows.append(_bar("ProfilerStep#7", "user_annotation", start, end + 50))
    at = start + draw.uniform(0, 800)
    while at < end:  # the next batch is made meanwhile, on a thread that hides nothing
        rows.append(_bar("aten::index", "cpu_op", at, at + draw.uniform(300, 2500), LOADER))
        at += rows[-1]["dur"] + draw.uniform(100, 700)
    draw.shuffle(rows)
    return rows


def _operators(rows: list[Event], now: float, n: int, name: str, draw: random.Random) -> float:
    """Operators on the main thread with others within them; returns when the last has ended."""
    for _ in range(n):
        lasts = draw.uniform(800, 4000)
        rows.append(_bar(name, "cpu_op", now, now + lasts))
        inner = now + 0.1 * lasts, now + draw.uniform(0.5, 0.9) * lasts
        rows.append(_bar("aten::mm", "cpu_op", *inner))
        rows.append(_bar("aten::resolve_conj", "cpu_op", inner[0], inner[0] + 0.2 * lasts))
        now += lasts + draw.uniform(5, 120)
    return now


def _all_reduces(ready: list[float], over: float, draw: random.Random) -> list[Event]:
    """One for each bucket, on two threads in turn: two are under way at the same time, all the longer at the end."""
    free, rows = [0.0, 0.0], []
    for k, at in enumerate(ready):
        begin = max(at, free[k % 2])
        last = k >= len(ready) - 2
        free[k % 2] = (max(begin, over) if last else begin) + draw.uniform(3000, 9000)
        rows.append(_bar("gloo:all_reduce", "user_annotation", begin, free[k % 2], GLOO[k % 2]))
    return rows


def _bar(name: str, kind: str, start: float, end: float, thread: int = MAIN) -> Event:
    a, b = round(start, 3), round(end, 3)
    return {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "ts": a, "dur": round(b - a, 3)}


def bars(events: list[Event]) -> list[Event]:
    """What has a start and a length."""
    return [e for e in events if e.get("ph") == "X"]


def span(event: Event) -> Span:
    """(start, end) in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def all_reduces(events: list[Event]) -> list[Event]:
    """In order of their starts."""
    return sorted((e for e in bars(events) if e["name"] == "gloo:all_reduce"), key=span)


def main_thread(events: list[Event]) -> int:
    """The thread of the profiler's step."""
    return next(e["tid"] for e in bars(events) if e["name"].startswith("ProfilerStep"))


def computing(events: list[Event]) -> list[Event]:
    """Operators of the main thread, other than calls of collectives."""
    main = main_thread(events)
    return [e for e in bars(events) if e["cat"] == "cpu_op" and e["tid"] == main and not e["name"].startswith("c10d::")]


def exposed_spans(events: list[Event]) -> list[Span]:
    """Where an all-reduce is under way and nothing computes, in microseconds. What the checker measures against."""
    return minus(union(map(span, all_reduces(events))), map(span, computing(events)))
