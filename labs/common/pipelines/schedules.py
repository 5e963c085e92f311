"""Schedules of micro-batches: the order of each stage's work, its cost and what it keeps. Pure functions.

A schedule is a list of actions per stage. It determines who waits for whom: a forward needs the previous stage's
result, a backward needs the next stage's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Action(NamedTuple):
    """Work of one stage on one micro-batch."""

    kind: str
    """"forward" or "backward"."""
    micro_batch: int


KINDS = ("forward", "backward", "send", "receive", "idle")

Schedule = Callable[[int, int, int], list[Action]]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Run all forwards, then all backwards, the same on every stage (Huang et al. 2019, arXiv:1811.06965)."""
    forwards = [Action("forward", i) for i in range(micro_batches)]
    return forwards + [Action("backward", i) for i in range(micro_batches)]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Run each backward as soon as possible: one forward, one backward (PipeDream-Flush, arXiv:2006.09503).

    A stage first runs as many forwards as it takes until the first gradient can return; it never keeps more than these.
    """
    warm_up = min(stages - stage, micro_batches)
    actions = [Action("forward", i) for i in range(warm_up)]
    for i in range(micro_batches):
        actions.append(Action("backward", i))
        if warm_up + i < micro_batches:
            actions.append(Action("forward", warm_up + i))
    return actions


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of the step in which a stage is idle: (p-1)/(m+p-1), for equal stages and free messages.

    Source: Huang et al. 2019, arXiv:1811.06965, section 2.3. Megatron's (p-1)/m is the same time relative to a stage's
    working time. The same for GPipe and 1F1B; m = 1 is the naive split.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def step_s(stage_s: float, per_micro_batch_s: float, stages: int, micro_batches: int) -> float:
    """Return seconds of a step: (m+p-1) turns of stage_s/m + per_micro_batch_s.

    `stage_s` is one stage's computation for the whole batch, forward and backward. `per_micro_batch_s` is the
    additional cost per micro-batch: messages, calls, gradient accumulation, smaller and so less efficient products.
    """
    return (micro_batches + stages - 1) * (stage_s / micro_batches + per_micro_batch_s)


def in_flight(actions: Sequence[Action]) -> int:
    """Return the most micro-batches whose activations a stage keeps at the same time."""
    now = most = 0
    for action in actions:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Event:
    """What a stage did from `start_s` to `end_s`: forward, backward, send, receive or idle."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float
    message: str = ""
    """What is sent or received: "activation" or "gradient"."""


def simulate(
    schedule: Schedule,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    message_s: Sequence[float] = (),
) -> list[Event]:
    """Simulate when each stage does what, from seconds per micro-batch and stage: the cost model of pipelines.

    `message_s[s]` is the duration of a message between stages s and s+1, on the sender and again on the receiver
    (default 0). It is usable once sent. ValueError if the schedule can never finish.
    """
    stages = len(forward_s)
    links = list(message_s) or [0.0] * (stages - 1)
    todo = [schedule(s, stages, micro_batches) for s in range(stages)]
    free, sent, events = [0.0] * stages, {}, []
    while any(todo):
        before = len(events)
        for s in range(stages):
            while todo[s] and (need := _needs(s, todo[s][0], stages)) in (None, *sent):
                events += _act(s, todo[s].pop(0), need, stages, free, sent, links, forward_s, backward_s)
        if len(events) == before:
            stuck = {s: f"{actions[0].kind} {actions[0].micro_batch}" for s, actions in enumerate(todo) if actions}
            raise ValueError(f"the schedule can never finish: every stage waits for another, {stuck}")
    return events


def _needs(stage: int, action: Action, stages: int) -> tuple[int, Action] | None:
    """Return the (stage, action) message that a stage needs before it can act; None if it needs nothing."""
    return None if stage == 0 and action.kind == "forward" else (stage, action)


def _act(
    s: int,
    action: Action,
    need: tuple | None,
    stages: int,
    free: list[float],
    sent: dict,
    links: list[float],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> list[Event]:
    """Advance stage `s` by one action: receive, compute, send."""
    forward, i = action.kind == "forward", action.micro_batch
    source, to = (s - 1, s + 1) if forward else (s + 1, s - 1)
    receive, send = (links[min(s, other)] if 0 <= other < stages else 0.0 for other in (source, to))
    start = free[s] if need is None else max(free[s], sent[need])
    message = "activation" if forward else "gradient"
    compute = (forward_s if forward else backward_s)[s]
    events = []
    for kind, seconds, of in (("receive", receive, message), (action.kind, compute, ""), ("send", send, message)):
        if seconds:
            events.append(Event(s, kind, i, start, start + seconds, of))
        start += seconds
    free[s] = start
    if forward and to == stages:
        sent[s, Action("backward", i)] = start  # the loss exists, so the last stage can start backward
    elif to >= 0:
        sent[to, action] = start
    return events


def with_idle(events: Sequence[Event], stages: int) -> list[Event]:
    """Fill the rest of each stage's time with "idle" events, between the first and last event of all stages.

    A stage blocked in a receive is idle until its neighbour starts to send. This needs a clock that all stages share,
    such as that of one machine.
    """
    begun = {(e.stage, e.message, e.micro_batch): e.start_s for e in events if e.kind == "send"}
    now, end = min(e.start_s for e in events), max(e.end_s for e in events)
    return [e for s in range(stages) for e in _of_stage(s, events, begun, now, end)]


def _of_stage(s: int, events: Sequence[Event], begun: dict, now: float, end: float) -> Iterator[Event]:
    for e in sorted((e for e in events if e.stage == s), key=lambda e: e.start_s):
        start = e.start_s
        if e.kind == "receive":
            sender = s - 1 if e.message == "activation" else s + 1
            start = min(max(start, begun[sender, e.message, e.micro_batch]), e.end_s)
        if start > now:
            yield Event(s, "idle", e.micro_batch, now, start)
        yield replace(e, start_s=start)
        now = e.end_s
    if end > now:
        yield Event(s, "idle", -1, now, end)


def span_s(events: Sequence[Event]) -> float:
    """Return seconds from the first start to the last end."""
    return max(e.end_s for e in events) - min(e.start_s for e in events)


def idle_share(events: Sequence[Event], stages: int) -> float:
    """Return the share of the step, averaged over stages, in which a stage neither computes nor passes on a message."""
    busy = sum(e.end_s - e.start_s for e in events if e.kind != "idle")
    return 1 - busy / (stages * span_s(events))
