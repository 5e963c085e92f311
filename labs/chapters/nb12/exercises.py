"""Exercises of notebook 12: the capstone, which cures are worth it; a file for each."""

from __future__ import annotations

from labs.chapters.nb12 import exercise_capstone
from labs.kit.check import Exercise

EXERCISES: dict[str, Exercise] = {
    "12.1": exercise_capstone.EXERCISE,
}
