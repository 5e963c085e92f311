"""Exercises of notebook 09: a file for each."""

from __future__ import annotations

from labs.chapters.nb09 import exercise_exposed

EXERCISES = {"09.2": exercise_exposed.EXERCISE}
