"""The room's page: one self-contained HTML file, made for a projector."""

from __future__ import annotations

import base64
import random
import string
import time
from pathlib import Path

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

from labs.classroom.collect import Question, Room, progress, questions, readiness
from labs.kit.plot import BLUE, ORANGE, figure, legend_below, to_png
from labs.kit.record import Record

PAGE = Path(__file__).with_name("room_page.html.txt").read_text(encoding="utf-8")


class Letters:
    """Letters instead of names, assigned at random and kept while this process runs: A to Z, then AA."""

    def __init__(self) -> None:
        self.free = [*string.ascii_uppercase, *(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)]
        self.dealt: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return this learner's letter; a newcomer gets a new one."""
        if name not in self.dealt:
            letter = random.SystemRandom().choice([x for x in self.free if len(x) == 1] or self.free)
            self.free.remove(letter)
            self.dealt[name] = f"learner {letter}"
        return self.dealt[name]


def render(room: Room, letters: Letters | None = None, refresh_s: float = 0.0) -> str:
    """Return the page as HTML, with letters instead of names if given."""
    problems = room.problems
    if letters is not None:
        for learner in room.learners:
            problems = [p.replace(f"{learner.name}: ", f"{letters(learner.name)}: ", 1) for p in problems]
            learner.name = letters(learner.name)
    ready, asked = readiness(room.learners), questions(room.learners)
    return (
        jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(PAGE)
        .render(
            room=room,
            problems=problems,
            ready=ready,
            verdicts={v: sum(r.verdict == v for r in ready) for v in ("GO", "NO-GO", "not run")},
            questions=[(q, message(q), picture(q)) for q in asked],
            progress=progress(room.learners),
            anonymous=letters is not None,
            refresh_ms=int(1000 * refresh_s),
            when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    )


def message(question: Question) -> str:
    """Return the question with the medians of predictions and results."""
    guess, result = question.medians
    unit = "" if question.unit in ("", "1") else f" {question.unit}"
    found = f"result {result:.3g}{unit}" if result is not None else "no result yet"
    return f"{question.what[:1].upper()}{question.what[1:]}: predicted {guess:.3g}{unit}, {found} (medians)"


def picture(question: Question) -> str:
    """Draw a row per learner with prediction and result; returns a data: URI."""
    with mpl.rc_context({"text.parse_math": False}):  # learners' texts may contain a $
        fig = _figure(question)
    return "data:image/png;base64," + base64.b64encode(to_png(fig)).decode()


def _figure(question: Question) -> Figure:
    rows = list(enumerate(question.answers))
    source = Record("room", "room", "1", (1.0,), "recorded", provenance={"source": "the learners' own files"})
    fig, ax = figure(
        message(question),
        xlabel=question.what + (f" ({question.unit})" if question.unit not in ("", "1") else ""),
        ylabel="learner",
        size=(7.6, 2.3 + 0.25 * max(len(rows), 3)),
        records=[source],
    )
    both = [(k, p, r) for k, (_, p, r) in rows if r is not None]
    ax.hlines([k for k, _, _ in both], [p for _, p, _ in both], [r for _, _, r in both], "#888888", linewidth=1)
    ax.plot(
        [p for _, (_, p, _) in rows],
        [k for k, _ in rows],
        "*",
        color=ORANGE,
        markersize=9,
        zorder=4,
        label="prediction",
    )
    ax.plot(
        [r for _, _, r in both],
        [k for k, _, _ in both],
        "s",
        color=BLUE,
        markersize=8,
        label="result",
    )
    values = [abs(v) for _, p, r in both for v in (p, r)]
    if values and min(values) > 0 and max(values) > 30 * min(values):
        ax.set_xscale("symlog", linthresh=min(values))
    ax.set_yticks([k for k, _ in rows], [name[:24] for _, (name, _, _) in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    legend_below(fig, ax)
    return fig
