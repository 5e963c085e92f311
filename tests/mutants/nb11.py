"""Typical mistakes in reading benchmark reports: answers for the reports that are shown by default."""

from __future__ import annotations

from labs.chapters.nb11.exercise_fooled import FIRST_SEAT
from labs.chapters.nb11.reports import made

MADE = made(FIRST_SEAT)
A_WAY = {one.way for one in MADE.values()} - {"sound", "blocked", "single_pair"}


def answers(way=lambda one: one.way, number=lambda one: one.honest):
    """Right answers, with something else in one place."""

    def which_way(reports):
        return {n: (way(MADE[n]), number(MADE[n])) for n in reports}

    return which_way


def tells(one):
    return one.honest is not None


MUTANTS = {
    "11.2": {
        "believes all": (answers(lambda one: "sound", lambda one: one.claimed), "you say sound; what line 1 says"),
        "suspects all": (answers(lambda one: one.way if one.way != "sound" else "one_clock"), "a fault at all?"),
        "one way for all": (answers(lambda one: min(A_WAY)), "speaks against it"),
        "the number of line 1": (answers(number=lambda one: one.claimed if tells(one) else None), "line 1 claims"),
        "no number at all": (answers(number=lambda one: None), "and yet lines"),
        "always a number": (answers(number=lambda one: one.honest or one.claimed), "no factor that anybody could tell"),
        "upside down": (answers(number=lambda one: (tells(one) and 1 / one.honest) or None), "upside down"),
        "percent": (answers(number=lambda one: (tells(one) and 100 * (one.honest - 1)) or None), "change in percent"),
    }
}
