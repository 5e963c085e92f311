"""Exercises of notebook 08: an all-reduce over two speeds and a job that survives; a file for each."""

from __future__ import annotations

from labs.chapters.nb08 import exercise_levels
from labs.chapters.nb08.exercise_elastic import check_survive
from labs.chapters.nb08.solution_elastic import survive
from labs.kit.check import Exercise

EXERCISES: dict[str, Exercise] = {
    "08.1": exercise_levels.EXERCISE,
    "08.2": Exercise("an entry point that survives", check_survive, survive),
}
