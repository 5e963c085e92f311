"""The page itself: one HTML file that needs nothing beside it, made to be projected."""

from __future__ import annotations

import random
import string
import time
from dataclasses import replace
from pathlib import Path

import jinja2

from labs.classroom.room.collect import Learner, Room
from labs.classroom.room.exercises import progress
from labs.classroom.room.figures import progress_figure, question_figure
from labs.classroom.room.machines import kinds_of_machines, tables
from labs.classroom.room.questions import OTHER, questions
from labs.classroom.room.readiness import readiness

ANONYMOUS = """Names are left out: letters are dealt anew each time the page is started. A wrong prediction is what
predicting is for; with a name on the wall, the next one would be cautious."""


class Seats:
    """Letters in place of names, dealt at random and kept while this process runs."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}

    def __call__(self, names: list[str]) -> dict[str, str]:
        """{name: letter} of all these; who is new gets a letter that is free."""
        new = [n for n in names if n not in self.letters]
        taken = len(self.letters)
        random.SystemRandom().shuffle(new)
        self.letters |= {name: seat(taken + k) for k, name in enumerate(new)}
        return {n: self.letters[n] for n in names}


def seat(number: int) -> str:
    """0 -> "seat A", 25 -> "seat Z", 26 -> "seat AA"."""
    letters = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        letters = string.ascii_uppercase[rest] + letters
    return f"seat {letters}"


def anonymous(room: Room, seats: Seats) -> Room:
    """The room with letters in place of names, in the order of the letters."""
    names = seats([learner.name for learner in room.learners])
    learners: list[Learner] = [replace(x, name=names[x.name]) for x in room.learners]
    problems = [(names.get(name, name), text) for name, text in room.problems]
    learners.sort(key=lambda x: (len(x.name), x.name))
    return replace(room, learners=learners, problems=problems)


def render(room: Room, *, hide_names: bool = False, refresh_s: float = 0.0) -> str:
    """The page as HTML."""
    where = room.folder.name or str(room.folder)
    asked = questions(room.learners)
    sections: dict[str, list] = {}
    for q in asked:
        place = q.asked.notebook if q.asked else OTHER
        sections.setdefault(place, []).append((q, question_figure(q, where)))
    solved = progress(room.learners)
    ready = readiness(room.learners)
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE)
    return template.render(
        room=room,
        where=where,
        ready=ready,
        verdicts={v: sum(r.verdict == v for r in ready) for v in ("GO", "NO-GO", "not run")},
        machines=kinds_of_machines(room.learners).most_common(),
        sections=sections,
        tables=tables(room.learners),
        solved=solved,
        solved_figure=progress_figure(tuple(solved), where) if solved else None,
        anonymous=ANONYMOUS if hide_names else "",
        refresh_ms=int(1000 * refresh_s),
        when=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


PAGE = (Path(__file__).with_name("page.html.txt")).read_text(encoding="utf-8")
