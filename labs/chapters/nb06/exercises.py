"""Exercises of notebook 06: reading a timeline; 06.1 and 06.4 have files of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_fsdp import check_sharded_linear
from labs.chapters.nb06.exercise_pipeline import check_order
from labs.common.pipelines import schedules
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Exercise, Mistake

Function = Callable[..., Any]

# -- 06.2: a timeline

Timeline = tuple[tuple[solution.Event, ...], int]


def _timeline(
    work: Sequence[float],
    micro_batches: int,
    message_s: float | Sequence[float],
    begin_s: float,
    *,
    backward: Sequence[float] = (),
    gradients: float = 1.0,
    late_s: float = 0.0,
) -> Timeline:
    """(events, stages) of a 1F1B step whose stages compute for `work` seconds each; the clock does not begin at 0.

    `backward`: its share of the work, by default 2/3. `gradients`: how long their receives take beside their sends.
    `late_s`: so long after the last backward stage 1 is done with its last send.
    """
    p, m = len(work), micro_batches
    shares = backward or [2 / 3] * p
    found = schedules.simulate(
        schedules.one_f_one_b,
        m,
        [w / m * (1 - b) for w, b in zip(work, shares, strict=True)],
        [w / m * b for w, b in zip(work, shares, strict=True)],
        [message_s] * (p - 1) if isinstance(message_s, float) else message_s,
    )
    events = []
    for e in sorted(found, key=lambda e: (e.stage, e.start_s)):  # rank by rank, as ranks hand them in
        start, end = e.start_s, e.end_s
        if (e.kind, e.message) == ("receive", "gradient"):
            start = end - gradients * (end - start)
        if late_s and (e.stage, e.kind, e.message, e.micro_batch) == (1, "send", "gradient", m - 1):
            end = schedules.span_s(found) + late_s
        events.append((e.stage, e.kind, e.micro_batch, begin_s + start, begin_s + end))
    return tuple(events), p


def _asked_for_early() -> Timeline:
    """A stage that has little to compute and receives while the other one works."""
    spans = (
        "F 0 .2, S 0 .01, F 1 .2, S 1 .01, R 0 .01, B 0 .3, R 1 .01, B 1 .3",
        "R 0 .21, F 0 .05, B 0 .08, S 0 .01, R 1 .07, F 1 .05, B 1 .08, S 1 .01",
    )
    kinds, events = {"F": "forward", "B": "backward", "S": "send", "R": "receive"}, []
    for stage, each in enumerate(spans):
        now = 30.0
        for kind, micro_batch, seconds in map(str.split, each.split(", ")):
            events.append((stage, kinds[kind], int(micro_batch), now, now := now + float(seconds)))
    return tuple(events), len(spans)


TIMELINES: list[Timeline] = [
    _timeline((0.38, 0.4, 0.39), 2, 0.004, 7.0), _timeline((0.2, 0.5), 8, 0.001, 100.0),
    _timeline((0.28, 0.3, 0.29, 0.27), 16, 0.015, 3.0), _timeline((0.3, 0.6, 0.31), 6, 0.01, 12.5),
    _timeline((0.25, 0.35), 4, 0.0, 1.0),
    _timeline((0.6, 0.55, 0.3, 0.28), 8, (0.01, 0.02, 0.005), 20.0, backward=(0.5, 0.75, 0.7, 0.6), gradients=0.25,
              late_s=0.06),
    _timeline((0.3, 0.29, 0.36, 0.6), 8, (0.001, 0.003, 0.005), 5.0),
    _asked_for_early(),
]  # fmt: skip
"""In turn: few micro-batches, an uneven cut, messages, all of them, no message at all; the slowest stage is the first,
and a send ends last; the slowest stage is the last; receives that are asked for early. In the last three another stage
spends most on messages; in the last of all so much that the rest is negative."""
TERMS = ("cut", "messages", "waiting")
Stages = list[float]
"""Seconds of each stage."""


def _seconds(case: Timeline, *kinds: str) -> Stages:
    return [sum(e[4] - e[3] for e in case[0] if e[0] == s and e[1] in kinds) for s in range(case[1])]


def _work(case: Timeline) -> Stages:
    return _seconds(case, "forward", "backward")


def _sent(case: Timeline) -> Stages:
    return _seconds(case, "send", "receive")


def _step(case: Timeline) -> float:
    """Seconds from the first start to the last end."""
    return max(e[4] for e in case[0]) - min(e[3] for e in case[0])


def _mean(seconds: Stages) -> float:
    return sum(seconds) / len(seconds)


def _beyond(seconds: Stages) -> float:
    return max(seconds) - _mean(seconds)


def _rest(case: Timeline, step_s: float) -> float:
    work = _work(case)
    return step_s - _mean(work) - _beyond(work) - max(_sent(case))


def _slip(what: str, hint: str, wrong: Callable[[Timeline], float]) -> Slip:
    return lambda c: _zero(wrong(c)), what, hint


PARTS = "of each stage: work = forward + backward seconds, messages = send + receive seconds"
BY_TERM: dict[str, list[Slip]] = {
    "cut": [
        _slip(
            "your work has the messages in it",
            PARTS,
            lambda c: _beyond([a + b for a, b in zip(_work(c), _sent(c), strict=True)]),
        ),
        _slip("these are milliseconds", "seconds", lambda c: 1e3 * _beyond(_work(c))),
    ],
    "messages": [
        _slip(
            "you add up the messages of all stages, which pass them at the same time",
            "of the stage that spends most on them",
            lambda c: sum(_sent(c)),
        ),
    ],
    "waiting": [
        _slip(
            "your step lasts from 0 on the clock: it begins with its first event",
            "the last end less the first start",
            lambda c: _rest(c, max(e[4] for e in c[0])),
        ),
        _slip(
            "waiting: you give 0 where the rest is below it",
            "leave it below 0: a message that takes long while another stage works costs the step nothing",
            lambda c: max(0.0, _rest(c, _step(c))),
        ),
    ],
}


def check_lost_time(f: Function) -> None:
    """Eight timelines of two to four stages."""
    got = [_as_terms(f([*events], p)) for events, p in TIMELINES]
    right = [solution.lost_time(*case) for case in TIMELINES]
    for term in TERMS:
        question = Question(term, TIMELINES, BY_TERM[term], _facts, PARTS + "; waiting is the rest of the step")
        question.judge([a[term] for a in got], [_zero(r[term]) for r in right])


def _as_terms(answer: Any) -> dict[str, float]:
    if not isinstance(answer, dict) or set(answer) != set(TERMS):
        raise Mistake(f"you return {answer!r:.60}", 'a dict: {"cut": ..., "messages": ..., "waiting": ...}, in seconds')
    return {term: _zero(number(answer[term], "0.02")) for term in TERMS}


def _zero(value: float) -> float:
    """The value; 0 for what is rounding."""
    return 0.0 if abs(value) < 1e-9 else value


def _facts(case: Timeline) -> str:
    micro_batches = 1 + max(e[2] for e in case[0])
    return f"{case[1]} stages, {micro_batches} micro-batches, {len(case[0])} events from {case[0][0][3]:g} s on"


EXERCISES = {
    "06.1": Exercise("the order of a pipeline's stage, under a memory limit", check_order, solution.order),
    "06.2": Exercise("where a pipeline's milliseconds go", check_lost_time, solution.lost_time),
    "06.4": Exercise("a layer of FSDP by hand", check_sharded_linear, solution.sharded_linear),
}
