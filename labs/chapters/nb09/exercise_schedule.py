"""Exercise 09.1: the profiler's schedule and ranges for a training loop whose costs are planted, and so known.

Each part of the job marks its own work in whatever trace is being recorded: what a range of the learner's must hold is
read off the same trace, with the same clock. A busy machine cannot make a right answer wrong.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from labs.kit import _compat
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake

PARTS = ("data", "forward", "backward", "exchange", "update")
MARK = "job: "  # begins the names that the job itself leaves in a trace

# -- the task: a training loop whose parts cost what was planted


@dataclass
class Job:
    """A small training. Every part sleeps `ms` beside its work, four times as long in the first `slow` steps."""

    steps: int
    slow: int
    active: int
    ms: dict[str, float]
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = nn.Linear(16, 4)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    @property
    def done(self) -> int:
        """Steps that were trained to their end."""
        return self.calls.count("update")

    @property
    def step(self) -> int:
        """The step that is under way, from 0."""
        return max(0, self.calls.count("data") - 1)

    def batches(self) -> Iterator[Tensor]:
        """One batch for each step. Nothing is loaded before it is asked for."""
        for _ in range(self.steps):
            self._next("data")
            with self._work("data"):
                x = torch.randn(8, 16)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        self._next("forward")
        with self._work("forward"):
            return self._model(x).square().mean()

    def backward(self, loss: Tensor) -> None:
        """The gradients."""
        self._next("backward")
        with self._work("backward"):
            self._optimizer.zero_grad()
            loss.backward()

    def exchange(self) -> Exchange:
        """Start the exchange of gradients, and return at once, as an all-reduce with async_op=True does."""
        self._next("exchange")
        return Exchange(self, time.perf_counter() + 1e-3 * self._cost_ms("exchange"))

    def update(self) -> None:
        """The optimizer's step."""
        self._next("update")
        with self._work("update"):
            self._optimizer.step()

    def _next(self, call: str) -> None:
        order = ("data", "forward", "backward", "exchange", "wait", "update")
        due = order[len(self.calls) % len(order)]
        if call != due:
            raise Mistake(
                f"in step {self.done} the loop calls {call!r} where {due!r} is due",
                "keep the given loop: batch, forward, backward, exchange, wait, update; add ranges and step() only",
            )
        self.calls.append(call)

    def _cost_ms(self, part: str) -> float:
        return self.ms[part] * (4 if self.step < self.slow else 1)

    def _work(self, part: str) -> _Work:
        return _Work(f"{MARK}{self.step} {part}", time.perf_counter() + 1e-3 * self._cost_ms(part))


@dataclass
class Exchange:
    """An exchange under way."""

    job: Job
    ends: float

    def wait(self) -> None:
        """Until it has ended."""
        self.job._next("wait")
        with _Work(f"{MARK}{self.job.step} exchange", self.ends):
            pass


class _Work(record_function):
    """A range of the job's own that lasts at least until `ends`, on the clock time.perf_counter."""

    def __init__(self, name: str, ends: float) -> None:
        super().__init__(name)
        self._ends = ends

    def __exit__(self, *exc: Any) -> None:
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        super().__exit__(*exc)


def jobs() -> list[Job]:
    """Two jobs that no constant fits both of."""
    return [
        Job(12, 3, 4, {"data": 6.0, "forward": 3.0, "backward": 5.0, "exchange": 4.0, "update": 2.0}),
        Job(11, 5, 2, {"data": 2.0, "forward": 5.0, "backward": 7.0, "exchange": 8.0, "update": 3.0}),
    ]


def profile_loop(job: Job) -> profile:
    """Skip the slow steps, the last of them as the profiler's own warm-up; then a range for each part."""
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
            with record_function("exchange"):  # the wait belongs to it: starting it takes no time
                job.exchange().wait()
            with record_function("update"):
                job.update()
            prof.step()
    return prof


# -- the checks


@dataclass(frozen=True)
class Seen:
    """What the learner's profiler recorded of one job; plain data, from a process of its own."""

    kind: str
    """The returned object's type"""
    done: int
    """Steps trained"""
    stepped: int
    """Calls of prof.step()"""
    running: bool
    """Never stopped"""
    scheduled: bool
    states: tuple[str, ...]
    """The profiler's state in each step, as its schedule says"""
    events: tuple[tuple[str, float, float], ...]
    """(name, start, end) in µs"""

    def ranges(self, name: str) -> list[tuple[float, float]]:
        """Intervals of the range `name`."""
        return [(start, end) for n, start, end in self.events if n == name]

    def marks(self) -> dict[tuple[int, str], tuple[float, float]]:
        """{(step, part): interval} of the work that was recorded."""
        parts = ((n.removeprefix(MARK).split(), a, b) for n, a, b in self.events if n.startswith(MARK))
        return {(int(step), part): (a, b) for (step, part), a, b in parts}


def look(f: Callable[[Job], Any], job: Job) -> Seen | Mistake:
    """Run the learner's function; on a rank."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints its start and its stop
    try:
        prof = f(job)
    except Mistake as mistake:
        return mistake
    if not isinstance(prof, profile):
        return Seen(type(prof).__name__, job.done, 0, False, False, (), ())
    running = prof.current_action is not ProfilerAction.NONE and prof.profiler is not None and _is_on()
    if running:
        prof.stop()
    scheduled = bool(prof.record_steps)
    states = tuple(prof.schedule(k).name for k in range(job.steps)) if scheduled else ("RECORD",) * job.steps
    try:
        events = prof.events() or []
    except (AssertionError, RuntimeError):  # nothing was recorded
        events = []
    found = tuple((e.name, float(e.time_range.start), float(e.time_range.end)) for e in events)
    wanted = tuple(e for e in found if e[0] in PARTS or e[0].startswith(MARK))
    return Seen("profile", job.done, prof.step_num, running, scheduled, states, wanted)


def _is_on() -> bool:
    return _compat.profiler_enabled()


def check_profile_loop(f: Callable[[Job], Any]) -> None:
    """The schedule first, then the ranges, of each job."""
    for job in jobs():
        [seen] = on_ranks(look, 1, f, job, when="")
        if isinstance(seen, Mistake):
            raise seen
        _check_run(seen, job)
        _check_schedule(seen, job)
        for part in PARTS:
            _check_range(seen, job, part)


def _check_run(seen: Seen, job: Job) -> None:
    if seen.kind != "profile":
        raise Mistake(f"you return a {seen.kind}, not the profiler", "return prof, the torch.profiler.profile")
    if seen.done != job.steps:
        raise Mistake(
            f"{seen.done} of {job.steps} steps were trained", "the training goes on when nothing is recorded any more"
        )
    if seen.running:
        raise Mistake(
            "the profiler is still running when you return it: there is no trace yet",
            "`with profile(...) as prof:` around the loop, or prof.stop() after it",
        )


def _check_schedule(seen: Seen, job: Job) -> None:
    if not seen.scheduled:
        raise Mistake(
            f"without a schedule all {job.steps} steps are in the trace, the {job.slow} slow ones too",
            "profile(..., schedule=schedule(wait=..., warmup=..., active=..., repeat=1))",
        )
    if seen.stepped == 0:
        raise Mistake(
            "prof.step() is never called, so the profiler stays in the first state of its schedule",
            "call prof.step() at the end of every step of the loop",
        )
    if abs(seen.stepped - job.steps) > 1:
        raise Mistake(
            f"prof.step() was called {seen.stepped} times in {job.steps} steps",
            "once per step of the training: the schedule counts these calls",
        )
    states, recorded = seen.states, sorted({step for step, _ in seen.marks()})
    planned = [k for k, state in enumerate(states) if state.startswith("RECORD")]
    if not recorded:
        raise Mistake(
            f"the trace is empty: by your schedule the loop of {job.steps} steps ends before anything is recorded",
            "wait + warmup + active must fit into job.steps",
        )
    if slow := [k for k in recorded if k < job.slow]:
        raise Mistake(
            f"step {slow[0]} is in the trace, and it is one of the first {job.slow}, which are slow",
            "wait + warmup must be job.slow at least",
        )
    if "WARMUP" not in states[: planned[0]]:
        raise Mistake(
            "the profiler has no warm-up: what its own start costs is in the first step of the trace",
            "warmup=1 or more: the profiler runs then, and what it sees is thrown away",
        )
    cycles = sum(a.startswith("RECORD") and not b.startswith("RECORD") for a, b in zip(states, (*states[1:], "NONE")))  # noqa: B905
    if cycles > 1:
        raise Mistake(
            f"your schedule starts again: it records {cycles} times in {job.steps} steps, and each trace "
            "takes the place of the one before",
            "repeat=1",
        )
    if len(recorded) != job.active:
        raise Mistake(
            f"{len(recorded)} steps are in the trace, and {job.active} were asked for"
            + (": a trace grows with every step" if len(recorded) > job.active else ""),
            "active=job.active, and as many steps of the loop must be left for it",
        )


WHY = {
    "data": "nothing is loaded before next(batches): the range must be around that, not around batches() or the use "
    "of x",
    "exchange": "exchange() only starts it; the time is in wait()",
}


def _check_range(seen: Seen, job: Job, part: str) -> None:
    ranges, marks = seen.ranges(part), seen.marks()
    if not ranges:
        raise Mistake(f"there is no range {part!r} in the trace", f'with record_function("{part}"):')
    shown_ms = 1e-3 * sum(b - a for a, b in ranges) / job.active
    for (step, of), (a, b) in marks.items():
        inside = any(start <= a and b <= end for start, end in ranges)
        if of == part and not inside:
            raise Mistake(
                f"{job.ms[part]:g} ms were planted in each step's {part!r}, and your range shows "
                f"{shown_ms:.1f} ms: the work of step {step} is not in it",
                WHY.get(part, f"the range must be around the whole call of job.{part}()"),
            )
        if of != part and inside:
            total = sum(end - start for name in PARTS for start, end in seen.ranges(name))
            step_us = statistics.fmean(_step_us(seen))
            together = f"the five ranges together are {total / job.active / step_us:.2f} of a step"
            raise Mistake(
                f"your range {part!r} also holds the work of {of!r}: {together}", "end one range before the next begins"
            )


def _step_us(seen: Seen) -> list[float]:
    """From the first to the last work of each recorded step, in µs."""
    steps: dict[int, list[tuple[float, float]]] = {}
    for (step, _), interval in seen.marks().items():
        steps.setdefault(step, []).append(interval)
    return [max(b for _, b in of) - min(a for a, _ in of) for of in steps.values()]


EXERCISE = Exercise("a schedule and ranges for the profiler", check_profile_loop, profile_loop)
