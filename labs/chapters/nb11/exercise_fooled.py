"""Exercise 11.2: which way did they fool you, and what can be told from their numbers? Six reports, made up by seat."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from labs.chapters.nb11.reports import WAYS, Made, Report, made
from labs.chapters.nb11.solutions import which_way
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake
from labs.kit.errors import brief, require

TOLERANCE = 0.01
"""Relative: medians of ratios, means of them and ratios of medians lie within it, and no other number does."""
FIRST_SEAT = 1
_shown = [FIRST_SEAT]  # the seat whose reports were shown last: those are judged


def show(seat: int = FIRST_SEAT) -> dict[int, Report]:
    """Print the six reports of a seat and return them by number; each seat has others."""
    require(isinstance(seat, int) and 1 <= seat <= 10_000, f"seat must be a whole number from 1 to 10000, not {seat!r}")
    _shown[:] = [seat]
    reports = {n: one.report for n, one in made(seat).items()}
    for n, report in reports.items():
        print(f"Report {n} (made up for this exercise)\n{report}\n")
    return reports


def show_ways() -> None:
    """Print the names that an answer may hold."""
    print("\n".join(f"{way:16} {words}" for way, words in WAYS.items()))


def check_which_way(f: Callable[..., Any]) -> None:
    """All six answers; what is wrong with each is told by lines of its report."""
    reports = made(FIRST_SEAT if inspect.unwrap(f) is which_way else _shown[-1])  # the reference is that of one seat
    answers = _answers(f({n: one.report for n, one in reports.items()}), reports)
    wrong = {n: said for n, one in reports.items() if (said := _way_problem(one, answers[n][0]))}
    wrong |= {n: said for n, one in reports.items() if n not in wrong and (said := _number_problem(one, answers[n][1]))}
    if wrong:
        right = len(reports) - len(wrong)
        said = "\n".join(f"    report {n}: {wrong[n]}" for n in sorted(wrong))
        raise Mistake(f"{right} of {len(reports)} reports are judged rightly\n{said}")


def _answers(answer: Any, reports: dict[int, Made]) -> dict[int, tuple[str, float | None]]:
    """{number of the report: (way, number or None)} of what the learner returns; Mistake if it is not that."""
    example = 'return {1: ("sound", 1.23), 2: ("single_pair", None), ...}'
    if isinstance(answer, list | tuple):
        answer = dict(enumerate(answer, start=1))
    if not isinstance(answer, dict):
        raise Mistake(f"you return {brief(answer)}", example)
    found = {}
    for n in reports:
        two = answer.get(n, answer.get(str(n)))
        if not isinstance(two, tuple | list) or len(two) != 2 or not isinstance(two[0], str):
            raise Mistake(f"for report {n} you return {brief(two)}, not a way and a number", example)
        way, value = two[0].strip(), getattr(two[1], "value", two[1])  # an Estimate has a value
        if way not in WAYS:
            raise Mistake(f"report {n}: {way!r:.60} is no name of a way", f"there are {', '.join(WAYS)}")
        if isinstance(value, bool | str):
            raise Mistake(f"for report {n} you return {brief(value)}, not a number", example)
        found[n] = way, None if value is None else number(value, "1.04, or None where the report cannot tell it")
    return found


def _way_problem(one: Made, way: str) -> str:
    """What speaks against this way, "" if it is right. The right one is not said."""
    if way == one.way:
        return ""
    n = one.against[way]
    if way == "sound":
        return f"you say sound; what line 1 says does not go with line {n}: {_line(one, n)}"
    if one.way == "sound":
        return f"you say {way}, and line {n} speaks against it: {_line(one, n)}. Is there a fault at all?"
    return f"you say {way}, and line {n} speaks against it: {_line(one, n)}"


def _number_problem(one: Made, value: float | None) -> str:
    """What is wrong with the number; "" if nothing is."""
    rows = " and ".join(map(str, one.rows))
    if one.honest is None:
        if value is None:
            return ""
        return f"{one.way} it is, and then line {one.against['sound']} leaves no factor that anybody could tell: None"
    if value is None:
        return f"{one.way} it is, and yet lines {rows} can tell how many times as fast B is"
    if math.isclose(value, one.honest, rel_tol=TOLERANCE):
        return ""
    if math.isclose(value, one.claimed, rel_tol=TOLERANCE):
        return f"{one.way} it is; {value:.2f} is what line 1 claims, and not what lines {rows} say"
    if math.isclose(value, 1 / one.honest, rel_tol=TOLERANCE):
        return f"{one.way} it is; {value:.2f} is upside down: above 1 means that B is faster"
    if math.isclose(value, 100 * (one.honest - 1), rel_tol=TOLERANCE):
        return f"{one.way} it is; {value:.2f} is a change in percent: give the factor, such as 1.04"
    return f"{one.way} it is; {value:.3g} is not how many times as fast B is by lines {rows}, round by round"


def _line(one: Made, n: int) -> str:
    text = " ".join(one.report.lines[n - 1].split())
    return f'"{text}"' if len(text) <= 90 else f'"{text[:87]}..."'


EXERCISE = Exercise("which way did they fool you?", check_which_way, which_way)
