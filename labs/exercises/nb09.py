"""Exercises of notebook 09: a profiler's schedule and ranges, and the exposed communication in a trace."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from labs.kit import _compat
from labs.kit.answers import on_ranks
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]
Event = dict[str, Any]

# -- 09.1

PARTS = ("data", "forward", "backward", "exchange", "update")
MARK = "job: "  # prefix of the ranges that the job itself records


class _Work(record_function):
    """A range that the job itself records; it lasts until time.perf_counter() reaches `ends`."""

    def __init__(self, name: str, ends: float) -> None:
        super().__init__(name)
        self._ends = ends

    def __exit__(self, *exc: Any) -> None:
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        super().__exit__(*exc)


@dataclass
class Job:
    """A small training run. Each part takes `ms[part]`, and four times as long in the first `slow` steps."""

    steps: int
    slow: int
    active: int
    ms: dict[str, float]
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = nn.Linear(16, 4)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def batches(self) -> Iterator[Tensor]:
        """Yield one batch per step. Each is loaded only when requested."""
        for _ in range(self.steps):
            with self._work("data"):
                x = torch.randn(8, 16)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        with self._work("forward"):
            return self._model(x).square().mean()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        with self._work("backward"):
            self._optimizer.zero_grad()
            loss.backward()

    def exchange(self) -> Exchange:
        """Start to exchange gradients and return at once, like an all-reduce with async_op=True."""
        self._next("exchange")
        return Exchange(self, time.perf_counter() + self._seconds("exchange"))

    def update(self) -> None:
        """Take the optimizer step."""
        with self._work("update"):
            self._optimizer.step()

    @property
    def step(self) -> int:
        """The current step, counted from 0."""
        return max(0, self.calls.count("data") - 1)

    def _next(self, call: str) -> None:
        order = ("data", "forward", "backward", "exchange", "wait", "update")
        due = order[len(self.calls) % len(order)]
        if call != due:
            raise RuntimeError(f"{call!r} where {due!r} is due: keep the given loop, add ranges and step() only")
        self.calls.append(call)

    def _seconds(self, part: str) -> float:
        return 1e-3 * self.ms[part] * (4 if self.step < self.slow else 1)

    def _work(self, part: str) -> _Work:
        self._next(part)
        return _Work(f"{MARK}{self.step} {part}", time.perf_counter() + self._seconds(part))


@dataclass
class Exchange:
    """An exchange of gradients in progress."""

    job: Job
    ends: float

    def wait(self) -> None:
        """Wait until it has ended."""
        self.job._next("wait")
        with _Work(f"{MARK}{self.job.step} exchange", self.ends):
            pass


def jobs() -> list[Job]:
    """Return two jobs, so that no hard-coded number fits both."""
    return [
        Job(12, 3, 4, {"data": 6.0, "forward": 3.0, "backward": 5.0, "exchange": 4.0, "update": 2.0}),
        Job(11, 5, 2, {"data": 2.0, "forward": 5.0, "backward": 7.0, "exchange": 8.0, "update": 3.0}),
    ]


def profile_loop(job: Job) -> profile:
    """Skip the slow steps, the last of them as the profiler's warm-up; a range around each part."""
    plan = schedule(wait=job.slow - 1, warmup=1, active=job.active, repeat=1)
    batches = job.batches()
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as prof:
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            with record_function("forward"):
                loss = job.forward(x)
            with record_function("backward"):
                job.backward(loss)
            with record_function("exchange"):
                work = job.exchange()
                work.wait()  # the time is here: starting it takes none
            with record_function("update"):
                job.update()
            prof.step()
    return prof


def _profiled(job: Job, plan: Callable | None, step: bool = True, wait_inside: bool = True) -> profile:
    """Run the reference with another schedule, without prof.step(), or with the wait outside its range."""
    batches = job.batches()
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as prof:
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            with record_function("forward"):
                loss = job.forward(x)
            with record_function("backward"):
                job.backward(loss)
            with record_function("exchange"):
                work = job.exchange()
                if wait_inside:
                    work.wait()
            if not wait_inside:
                work.wait()
            with record_function("update"):
                job.update()
            if step:
                prof.step()
    return prof


def _look(answer: Answer, job: Job) -> dict[str, Any]:
    """Return what the answer's profiler recorded; runs on a rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler prints when it starts and stops
    prof = answer(job)
    if not isinstance(prof, profile):
        return {"you return": type(prof).__name__}
    if running := _compat.profiler_enabled():
        prof.stop()
    try:
        events = [(e.name, e.time_range.start, e.time_range.end) for e in prof.events() or []]
    except (AssertionError, RuntimeError):  # nothing was recorded
        events = []
    marks = [(*name.removeprefix(MARK).split(), a, b) for name, a, b in events if name.startswith(MARK)]
    recorded = {int(step) for step, *_ in marks}
    first = min(recorded, default=0)
    warm = bool(prof.record_steps) and any(prof.schedule(k).name == "WARMUP" for k in range(first))
    held = {}
    for part in PARTS:
        ranges = [(a, b) for name, a, b in events if name == part]
        inside = {of for _, of, a, b in marks if any(start <= a and b <= end for start, end in ranges)}
        held[f"what your range {part!r} holds"] = ", ".join(of for of in PARTS if of in inside) or "nothing"
    return {
        "you return": "a profiler that runs" if running else "a profiler that has stopped",
        "steps trained": job.calls.count("update"),
        "slow steps in the trace": sum(step < job.slow for step in recorded),
        "steps in the trace": len(recorded),
        "the profiler warmed up first": warm,
        **held,
    }


def observe_profile_loop(answer: Answer) -> dict[str, Any]:
    """Return the steps in each job's trace, and what the ranges hold."""
    seen = {}
    for number, job in enumerate(jobs(), 1):
        [found] = on_ranks(_look, 1, answer, job, when="")
        seen |= {f"job {number}, {what}": value for what, value in found.items()}
    return seen


# -- 09.2

MAIN, GLOO, LOADER = 4100, (4117, 4118), 4203  # threads


def exposed_ms(events: list[Event]) -> float:
    """Milliseconds in which an all-reduce is under way and the main thread runs no operator."""
    bars = [e for e in events if e["ph"] == "X"]
    main = next(e["tid"] for e in bars if e["name"].startswith("ProfilerStep#"))
    marks = []  # (moment, all-reduces that begin or end there, operators that do)
    for e in bars:
        reduces = e["name"] == "gloo:all_reduce"
        computes = e["cat"] == "cpu_op" and e["tid"] == main and not e["name"].startswith("c10d::")
        marks += [(e["ts"], reduces, computes), (e["ts"] + e["dur"], -reduces, -computes)]
    total_us = before = under_way = running = 0
    for moment, reduces, computes in sorted(marks):
        if under_way and not running:
            total_us += moment - before
        before, under_way, running = moment, under_way + reduces, running + computes
    return total_us / 1000


def _bars(events: list[Event], keep: Callable[[Event], bool]) -> list[tuple[float, float]]:
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and keep(e))


def _under_way(events: list[Event]) -> float:
    """Return all milliseconds in which an all-reduce is running, hidden or not."""
    total, end = 0.0, 0.0
    for a, b in _bars(events, lambda e: e["name"] == "gloo:all_reduce"):
        total, end = total + max(0.0, b - max(a, end)), max(end, b)
    return total / 1000


def _one_by_one(events: list[Event]) -> float:
    """Add up the all-reduces one by one, so time in which two are running counts twice."""
    reduces = [e for e in events if e["name"] == "gloo:all_reduce"]
    others = [e for e in events if e["name"] != "gloo:all_reduce"]
    return sum(exposed_ms([*others, reduce]) for reduce in reduces)


def _every_thread(events: list[Event]) -> float:
    """Let the loader's operators hide communication."""
    return exposed_ms([e | {"tid": MAIN} if e.get("cat") == "cpu_op" else e for e in events])


def _calls_compute(events: list[Event]) -> float:
    """Count handing a bucket over as computing."""
    return exposed_ms([e | {"name": e["name"].removeprefix("c10d::")} for e in events])


def made_events(seed: int) -> list[Event]:
    """Make a step's events as torch.profiler writes them, unordered: two gloo threads, nested operators, a loader."""
    draw = random.Random(seed)
    rows: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": MAIN, "args": {"name": "python"}},
        {"ph": "i", "name": "Record Window End", "pid": 9, "tid": MAIN, "ts": 1.0},
    ]
    start = draw.uniform(1e3, 9e5)
    forward = start + draw.uniform(400, 1500)
    now = _operators(rows, forward, draw.randint(3, 5), "aten::linear", draw)
    rows.append(_bar("forward", "user_annotation", forward, now))
    backward, ready = now, []
    for _ in range(draw.randint(3, 5)):
        now = _operators(rows, now + draw.uniform(50, 300), draw.randint(1, 3), "AddmmBackward0", draw)
        rows.append(_bar("c10d::allreduce_", "cpu_op", now + 5, now + draw.uniform(200, 900)))
        ready.append(now + 20)
        now = rows[-1]["ts"] + rows[-1]["dur"]
    free = [0.0, 0.0]
    for k, at in enumerate(ready):  # alternate threads; the last two end after backward's last operator
        begin = max(at, free[k % 2])
        free[k % 2] = (max(begin, now) if k >= len(ready) - 2 else begin) + draw.uniform(3000, 9000)
        rows.append(_bar("gloo:all_reduce", "user_annotation", begin, free[k % 2], GLOO[k % 2]))
    end = max(free) + draw.uniform(30, 90)
    rows.append(_bar("backward", "user_annotation", backward, end))
    optimizer = end + draw.uniform(10, 40)
    end = _operators(rows, optimizer, 2, "Optimizer.step#SGD.step", draw)
    rows.append(_bar("optimizer", "user_annotation", optimizer, end))
    rows.append(_bar("ProfilerStep#7", "user_annotation", start, end + 50))
    at = start + draw.uniform(0, 800)
    while at < end:  # a loader's thread makes the next batch
        rows.append(_bar("aten::index", "cpu_op", at, at + draw.uniform(300, 2500), LOADER))
        at += rows[-1]["dur"] + draw.uniform(100, 700)
    draw.shuffle(rows)
    return rows


def _operators(rows: list[Event], now: float, n: int, name: str, draw: random.Random) -> float:
    """Add n operators with nested ones to the main thread; return when the last one ends."""
    for _ in range(n):
        lasts = draw.uniform(800, 4000)
        rows.append(_bar(name, "cpu_op", now, now + lasts))
        inner = now + 0.1 * lasts, now + draw.uniform(0.5, 0.9) * lasts
        rows.append(_bar("aten::mm", "cpu_op", *inner))
        now += lasts + draw.uniform(5, 120)
    return now


def _bar(name: str, kind: str, start: float, end: float, thread: int = MAIN) -> Event:
    a, b = round(start, 3), round(end, 3)
    return {"ph": "X", "cat": kind, "name": name, "pid": 9, "tid": thread, "ts": a, "dur": round(b - a, 3)}


def observe_exposed_ms(answer: Answer) -> dict[str, Any]:
    """Return the answer's exposed milliseconds for each made step."""
    return {f"made step {seed}, ms": float(answer(made_events(seed))) for seed in range(8)}


EXERCISES = {
    "09.1": Exercise(
        "09.1",
        20,
        "write a profiler's schedule and ranges",
        observe_profile_loop,
        profile_loop,
        (
            KnownMistake(
                "all steps are in the trace, the slow ones as well",
                "profile(..., schedule=schedule(wait=..., warmup=..., active=job.active, repeat=1))",
                lambda job: _profiled(job, None),
            ),
            KnownMistake(
                "prof.step() is never called, so the profiler stays in the first state of its schedule",
                "call prof.step() at the end of every step",
                lambda job: _profiled(job, schedule(wait=job.slow - 1, warmup=1, active=job.active, repeat=1), False),
            ),
            KnownMistake(
                "the profiler has no warm-up: its own start costs time in the first recorded step",
                "wait=job.slow - 1, warmup=1",
                lambda job: _profiled(job, schedule(wait=job.slow, warmup=0, active=job.active, repeat=1)),
            ),
            KnownMistake(
                "your range 'exchange' doesn't hold the exchange: exchange() only starts it",
                "the time is in wait(): put both calls into the range",
                lambda job: _profiled(
                    job, schedule(wait=job.slow - 1, warmup=1, active=job.active, repeat=1), wait_inside=False
                ),
            ),
        ),
    ),
    "09.2": Exercise(
        "09.2",
        25,
        "find the exposed communication in a trace",
        observe_exposed_ms,
        exposed_ms,
        (
            KnownMistake(
                "this is all the time in which an all-reduce is under way, with what backward hides",
                "leave out the time in which an operator of the main thread runs",
                _under_way,
            ),
            KnownMistake(
                "where two all-reduces are under way at once, you count the time twice",
                "join their spans first, or count how many are under way",
                _one_by_one,
            ),
            KnownMistake(
                "you let another thread's operators hide communication: the loader's don't make this rank compute",
                "only operators whose tid is that of ProfilerStep#",
                _every_thread,
            ),
            KnownMistake(
                "you count a call of c10d:: as computing: it only hands a bucket over",
                "leave out the names that begin with c10d::",
                _calls_compute,
            ),
        ),
    ),
}
