"""Exercises of notebook 11: a judge of one statement, six reports to see through; a file for each."""

from __future__ import annotations

from labs.chapters.nb11 import exercise_fooled
from labs.kit.check import Exercise

EXERCISES: dict[str, Exercise] = {
    "11.2": exercise_fooled.EXERCISE,
}
