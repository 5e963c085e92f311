"""Exercises of notebook 09: a profiler's plan, an exposed exchange; a file for each."""

from __future__ import annotations

from labs.chapters.nb09 import exercise_exposed, exercise_schedule
from labs.kit.check import Exercise

EXERCISES: dict[str, Exercise] = {
    "09.1": exercise_schedule.EXERCISE,
    "09.2": exercise_exposed.EXERCISE,
}
