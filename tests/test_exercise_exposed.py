"""Exercise 09.2: right answers of another style pass, and each typical mistake has its name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mutants.nb09_exposed import MORE, MUTANTS

from labs.chapters.nb09 import solution_exposed as solution
from labs.chapters.nb09 import trace_cases
from labs.chapters.nb09.exercise_exposed import CASES, SLIPS
from labs.common.profiling import intervals
from labs.kit import check


def examine(candidate):
    return check.examine("09.2", candidate)


def on_a_grid(events):
    """With nanoseconds in an array: every one is marked by what covers it."""
    bars = [e for e in events if e["ph"] == "X"]
    first = min(e["ts"] for e in bars)
    main = next(e["tid"] for e in bars if e["name"].startswith("ProfilerStep"))
    reduces, computes = (np.zeros(round(max(e["ts"] + e["dur"] for e in bars) - first) * 20 + 40, bool) for _ in "ab")
    for e in bars:
        cells = slice(round(20 * (e["ts"] - first)), round(20 * (e["ts"] - first + e["dur"])))
        if e["name"] == "gloo:all_reduce":
            reduces[cells] = True
        elif e["tid"] == main and e["cat"] == "cpu_op" and "c10d" not in e["name"]:
            computes[cells] = True
    return np.float64((reduces & ~computes).sum() / 20 / 1000)


def with_moments(events):
    """Between two neighbouring moments of any event nothing changes: one question for each stretch."""
    bars = [(e["ts"], e["ts"] + e["dur"], e) for e in events if "dur" in e]
    [thread] = {e["tid"] for *_, e in bars if "ProfilerStep" in e["name"]}
    moments = sorted({t for a, b, _ in bars for t in (a, b)})
    total = 0.0
    for a, b in itertools.pairwise(moments):
        there = [e for start, end, e in bars if start <= a and end >= b]
        reduces = any(e["name"].startswith("gloo:") for e in there)
        computes = any(e["cat"] == "cpu_op" and e["tid"] == thread and e["name"][:6] != "c10d::" for e in there)
        total += (b - a) * (reduces and not computes)
    return total * 1e-3


def with_the_courses_intervals(events):
    spans = {True: [], False: []}
    main = trace_cases.main_thread(events)
    for e in events:
        if e["ph"] != "X" or e["name"].startswith("c10d"):
            continue
        if e["name"] == "gloo:all_reduce" or (e["cat"] == "cpu_op" and e["tid"] == main):
            spans[e["name"] == "gloo:all_reduce"].append((e["ts"], e["ts"] + e["dur"]))
    return intervals.length(intervals.minus(spans[True], spans[False])) / 1000


@pytest.mark.parametrize("right", [solution.exposed_ms, on_a_grid, with_moments, with_the_courses_intervals])
def test_right_answers_pass(right):
    outcome = examine(right)
    assert outcome.state == "passed", outcome.text


def test_the_stub_is_to_do():
    assert examine(lambda events: check.TODO).state == "to do"


@pytest.mark.parametrize("name", [*MUTANTS["09.2"], *MORE["09.2"]])
def test_mistakes_have_their_name(name):
    candidate, words = (MUTANTS["09.2"] | MORE["09.2"])[name]
    outcome = examine(candidate)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


def test_every_slip_gives_other_numbers_than_the_right_answer_and_than_every_other_slip():
    rows = [[slip(which) for which in CASES] for slip, *_ in SLIPS]
    rows.append([solution.exposed_ms(trace_cases.case(which)) for which in CASES])
    for k, a in enumerate(rows):
        assert not any(np.allclose(a, b, rtol=1e-3, atol=0) for b in rows[:k]), k


def test_an_answer_may_spoil_its_events():
    def spoiling(events):
        found = solution.exposed_ms(events)
        events.clear()
        return found

    assert examine(spoiling).state == "passed"


def test_the_recorded_step_is_a_late_rank_1_whose_wait_is_rank_0s():
    waits = [intervals.length(trace_cases.exposed_spans(trace_cases.case(f"rank {r}"))) / 1000 for r in (0, 1)]
    assert waits[0] > waits[1] + 5, waits
    assert "rank 1 is late" in trace_cases.about()
