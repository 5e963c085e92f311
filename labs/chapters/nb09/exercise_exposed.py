"""Exercise 09.2: the exposed communication in a trace, on a recorded step of two ranks and on some made from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from labs.chapters.nb09 import trace_cases as cases
from labs.chapters.nb09.solution_exposed import exposed_ms
from labs.chapters.nb09.trace_cases import Event, all_reduces, bars, computing, main_thread, span
from labs.common.profiling.intervals import Span, length, minus, union
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Exercise

CASES = (*range(200, 208), "rank 0", "rank 1")

TASK = """
Write `exposed_ms(events)`: how many milliseconds of this step the communication is *exposed* on this rank, that is an
all-reduce is under way and the main thread runs no operator. `events` are what torch.profiler wrote for one rank, as
dictionaries in no order: times `ts` and `dur` in microseconds, of bars (`"ph": "X"`) alone. All-reduces are named
`gloo:all_reduce` and run on two threads of gloo. Operators are of category (`cat`) `cpu_op`; one that begins with
`c10d::` only hands a bucket to gloo and counts as none. The main thread is the one that has the bar `ProfilerStep#`.
"""
HINTS = (
    "first the time in which at least one all-reduce is under way, then take out the time in which at least one "
    "operator runs: both are unions of spans, so what overlaps counts once",
    "one way: sort all starts and ends, walk along them and keep two counters, all-reduces under way and operators "
    "that run; add up the stretches where the first is above 0 and the second is 0",
)


def _slip(exposed: Callable[[list[Event]], Iterable[Span]], what: str, hint: str) -> Slip:
    """A mistake that takes these spans for the exposed ones, counted as often as they are listed."""
    return (lambda which: sum(b - a for a, b in exposed(cases.case(which))) / 1000), what, hint


def _right(events: list[Event]) -> list[Span]:
    return cases.exposed_spans(events)


def _every(events: list[Event]) -> list[Span]:
    return [span(e) for e in all_reduces(events)]


def _one_by_one(events: list[Event]) -> list[Span]:
    busy = [span(e) for e in computing(events)]
    return [part for e in _every(events) for part in minus([e], busy)]


def _without(keep: Callable[[Event, int], bool]) -> Callable[[list[Event]], list[Span]]:
    """Exposed, if what computes were the bars that `keep(bar, main thread)` keeps."""

    def exposed(events: list[Event]) -> list[Span]:
        main = main_thread(events)
        return minus(_every(events), [span(e) for e in bars(events) if keep(e, main)])

    return exposed


def _after_last_operator(events: list[Event]) -> list[Span]:
    reduces = all_reduces(events)
    end = max(b for _, b in map(span, reduces))
    before = [span(e)[1] for e in computing(events) if e["ts"] < end]
    return [(last, end)] if (last := max(before)) < end else []


def _nested_twice(which: Any) -> float:
    events = cases.case(which)
    under_way = union(_every(events))
    operators = sum(length(minus([span(e)], minus([span(e)], under_way))) for e in computing(events))
    return (length(under_way) - operators) / 1000


def _is_operator(e: Event) -> bool:
    return e["cat"] == "cpu_op" and not e["name"].startswith("c10d::")


SLIPS: list[Slip] = [
    _slip(lambda ev: [(1000 * a, 1000 * b) for a, b in _right(ev)], "this is in microseconds", "1000 of them are 1 ms"),
    _slip(lambda ev: [(a / 1000, b / 1000) for a, b in _right(ev)], "this is in seconds", "1 ms is 1000 microseconds"),
    _slip(
        _every,
        "this is the sum of all all-reduces' durations, with what backward hides and with what two of them share",
        "take out the time in which an operator of the main thread runs",
    ),
    _slip(
        lambda ev: union(_every(ev)),
        "this is all the time in which an all-reduce is under way, with what backward hides",
        "take out the time in which an operator of the main thread runs",
    ),
    _slip(
        lambda ev: minus(_every(ev)[-1:], [span(e) for e in computing(ev)]),
        "this is what the last all-reduce alone leaves exposed",
        "others are under way in gaps of backward, or after it",
    ),
    _slip(
        _after_last_operator,
        "this is only what comes after backward's last operator",
        "between two operators the main thread waits, too, if an all-reduce is under way",
    ),
    _slip(
        _one_by_one,
        "where two all-reduces are under way at the same time, you count the time twice",
        "join the spans of the all-reduces first",
    ),
    _slip(
        _without(lambda e, main: _is_operator(e)),
        "an operator of another thread hides nothing here: you take out the time in which the loader's thread works",
        "only the operators whose tid is that of ProfilerStep#",
    ),
    _slip(
        _without(lambda e, main: e["cat"] == "cpu_op" and e["tid"] == main),
        "a call of c10d:: counts as computing with you: it only hands a bucket over",
        "leave out the names that begin with c10d::",
    ),
    _slip(
        _without(lambda e, main: e["name"] == "backward" or (_is_operator(e) and e["tid"] == main)),
        "you take out all of the range `backward`: it lasts until the gradients are averaged, the wait is in it",
        "only operators compute, of category cpu_op; a range of record_function says what the rank is at",
    ),
    _slip(
        lambda ev: minus([span(e) for e in computing(ev)], minus([span(e) for e in computing(ev)], _every(ev))),
        "this is the hidden part, where an all-reduce and an operator run together",
        "the exposed one is where the all-reduce is alone",
    ),
    _slip(
        lambda ev: minus(
            [next(span(e) for e in bars(ev) if e["name"] == "backward")], [span(e) for e in computing(ev)]
        ),
        "this is all of backward in which no operator runs, also where no all-reduce is under way",
        "both must hold: an all-reduce is under way, and no operator runs",
    ),
    (
        _nested_twice,
        "an operator that runs within another one is taken out twice",
        "join the spans of the operators first: aten::mm runs within evaluate_function",
    ),
]


def _facts(which: int | str) -> str:
    name = f"the recorded step, {which}" if isinstance(which, str) else f"trace_cases.case({which})"
    return f"{name}, with {len(all_reduces(cases.case(which)))} all-reduces"


def check_exposed(f: Callable[..., Any]) -> None:
    """The exposed ms of every case."""
    got = [number(f(cases.case(which)), "4.2") for which in CASES]
    want = [length(cases.exposed_spans(cases.case(which))) / 1000 for which in CASES]
    Question("the exposed time in ms", CASES, SLIPS, _facts, HINTS[0]).judge(got, want)


EXERCISE = Exercise("the exposed communication in a trace", check_exposed, exposed_ms)
