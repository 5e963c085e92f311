"""Exercises of notebook 10: a deadlock to mend, a replica check, a post-mortem from dumps alone; a file for each."""

from __future__ import annotations

from labs.chapters.nb10 import exercise_deadlock, exercise_post_mortem, exercise_replicas
from labs.kit.check import Exercise

EXERCISES: dict[str, Exercise] = {
    "10.1": exercise_deadlock.EXERCISE,
    "10.2": exercise_replicas.EXERCISE,
    "10.3": exercise_post_mortem.EXERCISE,
}
