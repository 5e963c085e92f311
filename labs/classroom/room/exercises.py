"""How far the room is with the exercises, and what it should talk about."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from labs.classroom.room.collect import STATES, Learner

MOST = 3  # lines of feedback per exercise


@dataclass(frozen=True)
class Progress:
    """Learners by the state of their latest check of one exercise, and the feedback that most of them met."""

    exercise: str
    passed: int
    not_yet: int
    to_do: int
    feedback: tuple[tuple[str, int, int], ...]
    """(line, learners who met it, of whom have passed by now)"""


def progress(learners: list[Learner]) -> list[Progress]:
    """All exercises that anybody has checked, in order."""
    latest: dict[str, dict[str, str]] = defaultdict(dict)
    met: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for learner in learners:
        for row in learner.outcomes:
            latest[row["exercise"]][learner.name] = row["state"]
            if row["feedback"]:
                met[row["exercise"]][row["feedback"]].add(learner.name)
    return [_progress(e, latest[e], met[e]) for e in sorted(latest)]


def _progress(exercise: str, states: dict[str, str], met: dict[str, set[str]]) -> Progress:
    count = Counter(states.values())
    common = sorted(met.items(), key=lambda item: (-len(item[1]), item[0]))[:MOST]
    feedback = tuple((line, len(who), sum(states[name] == "passed" for name in who)) for line, who in common)
    return Progress(exercise, *(count[s] for s in STATES), feedback)
