"""The room's figures: predictions against measurements, and exercises.

Each is a PNG with its alternative text. They are remembered, so that a page drawn again redraws what changed.
"""

from __future__ import annotations

import base64
import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from labs.classroom.room.exercises import Progress
from labs.classroom.room.questions import Question
from labs.kit.measure import Estimate
from labs.kit.plot import BLUE, GREEN, GREY, ORANGE, figure, plain_number, points, spans, to_png
from labs.kit.record import Kind, Record

ROW_IN = 0.25  # of a figure's height
LOG_FROM = 30  # highest over lowest, from which an axis is logarithmic
AS_IT_IS = {"text.parse_math": False}  # a $ in what others wrote begins no formula


@dataclass(frozen=True)
class Drawn:
    """A figure as a data: URI, and its text."""

    src: str
    alt: str


@functools.lru_cache(maxsize=512)
@mpl.rc_context(AS_IT_IS)
def question_figure(question: Question, where: str) -> Drawn:
    """One row per learner: the star is the prediction, the mark what their machine gave; lines are the medians."""
    guess, found = question.medians
    unit = _short(question.unit) if question.unit not in ("", "1") else ""
    what = _short(question.what, 100)
    said = [
        f"predicted {_number(guess, unit)}" if guess is not None else "no predictions",
        f"{question.kind} {_number(found, unit)}" if found is not None else "nobody has measured it yet",
    ]
    message = f"{_capital(what)}: {', '.join(said)}"
    message += " (medians)" if len(question.answers) > 1 else ""
    names = [_short(a.name) for a in question.answers]
    label = f"{what} ({unit})" if unit else what
    fig, ax = figure(
        message,
        xlabel=label,
        ylabel="learner",
        size=_size(len(names)),
        legend_below=True,
        records=_origin(where, *_found(question)),
    )
    _rows(ax, question)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    _medians(ax, question)
    _scale(ax, question.predicted + question.found)
    alt = f"{message}. {_spread('Predictions', question.predicted, unit)} {_spread('Found', question.found, unit)}"
    return _drawn(fig, alt)


def _rows(ax: Axes, question: Question) -> None:
    """Each learner's prediction and what was found, joined by a thin line."""
    answers = list(enumerate(question.answers))
    guessed, found = ([(k, a) for k, a in answers if getattr(a, name) is not None] for name in ("predicted", "value"))
    both = [(k, a) for k, a in guessed if a.value is not None]
    ax.hlines(
        [k for k, _ in both], [a.predicted for _, a in both], [a.value for _, a in both], GREY, linewidth=1, zorder=1
    )
    if question.kind == "measured" and found:
        _marks(ax, [k for k, _ in found], [Estimate(a.value, a.low, a.high, 1) for _, a in found])
    elif found:
        rows = [k for k, _ in found]
        drawn = ax.vlines(
            [a.value for _, a in found],
            [k - 0.4 for k in rows],
            [k + 0.4 for k in rows],
            BLUE,
            linewidth=2.5,
            label=question.kind,
        )
        drawn.set_gid("kind:modelled")
    points(ax, [a.predicted for _, a in guessed], [k for k, _ in guessed], kind="prediction")
    for container in ax.containers:
        if "your prediction" in str(container.get_label()):
            container.set_label("prediction")  # in a room it is not "yours"


def _marks(ax: Axes, rows: Sequence[float], found: Sequence[Estimate]) -> None:
    """A mark with its interval per row, as marks.bars draws them, but all at once: a room has many rows."""
    values = [e.value for e in found]
    spread = [[max(0.0, e.value - e.low) for e in found], [max(0.0, e.high - e.value) for e in found]]
    drawn = ax.errorbar(
        values,
        rows,
        xerr=spread,
        color=BLUE,
        marker="s",
        markersize=7,
        capsize=3,
        linestyle="none",
        elinewidth=1.2,
        label="measured, recorded",
        zorder=3,
    )
    drawn.lines[0].set_gid("kind:recorded")


def _medians(ax: Axes, question: Question) -> None:
    for value, color, word in zip(question.medians, (ORANGE, BLUE), ("predicted", question.kind), strict=True):
        if value is not None and len(question.answers) > 1:
            ax.axvline(value, color=color, linestyle=":", linewidth=1.5, zorder=0, label=f"median {word}")


@functools.lru_cache(maxsize=8)
@mpl.rc_context(AS_IT_IS)
def progress_figure(rows: tuple[Progress, ...], where: str) -> Drawn:
    """One bar per exercise: learners by the state of their latest check."""
    passed, not_yet, to_do = (sum(getattr(p, name) for p in rows) for name in ("passed", "not_yet", "to_do"))
    message = f"Of {passed + not_yet + to_do} checks {passed} passed, {not_yet} have not yet, {to_do} are to do"
    fig, ax = figure(
        message,
        xlabel="learners",
        ylabel="exercise",
        size=_size(len(rows)),
        legend_below=True,
        records=_origin(where, "by the latest check of each learner"),
    )
    looks = {"passed": (GREEN, ""), "not yet": (ORANGE, "//"), "to do": ("#BDBDBD", "..")}
    drawn: set[str] = set()
    for row, p in enumerate(rows):
        start = 0
        for word, n in (("passed", p.passed), ("not yet", p.not_yet), ("to do", p.to_do)):
            if n:
                color, hatch = looks[word]
                label = "" if word in drawn else f"{word} (recorded)"
                spans(ax, row, [(start, start + n)], kind="recorded", label=label, color=color, hatch=hatch)
                drawn.add(word)
            start += n
    most = max(p.passed + p.not_yet + p.to_do for p in rows)
    ax.set_xlim(0, most)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_yticks(range(len(rows)), [p.exercise for p in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    listed = "; ".join(f"{p.exercise}: {p.passed} passed, {p.not_yet} not yet, {p.to_do} to do" for p in rows)
    return _drawn(fig, f"{message}. {listed}.")


def _origin(where: str, what: str, kind: Kind = "recorded") -> list[Record]:
    """What the line under the figure says: a record that stands for all those of the room."""
    return [Record("room", "room", "1", (1.0,), kind, provenance={"source": f"{what}, files in {where}"})]


def _found(question: Question) -> tuple[str, Kind]:
    n = len(question.found)
    if n and question.kind != "measured":
        return f"computed by the notebooks of {n} learner{'s' * (n > 1)}", "modelled"
    return (_measured(n, question.machines) if n else "predicted, not measured yet"), "recorded"


def _measured(learners: int, kinds: int) -> str:
    by = f"measured by {learners} learner{'s' * (learners > 1)}"
    return f"{by} on {kinds} kind{'s' * (kinds > 1)} of machine{'s' * (kinds > 1)}"


def _scale(ax: Axes, values: Iterable[float]) -> None:
    """Logarithmic where the numbers' range demands it; with signs or zeros, linear around zero and then logarithmic."""
    sizes = sorted(abs(v) for v in values if v)
    signs = {v > 0 for v in values}
    if sizes and sizes[-1] > LOG_FROM * sizes[0] and signs == {True}:
        ax.set_xscale("log")
        decades = math.log10(sizes[-1] / sizes[0])
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=9))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel(f"{ax.get_xlabel()}, logarithmic")
    elif sizes and sizes[-1] > LOG_FROM * statistics.median(sizes):
        ax.set_xscale("symlog", linthresh=statistics.median(sizes))
        ax.set_xlabel(f"{ax.get_xlabel()}, logarithmic far from 0")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: plain_number(_round(v))))


def _size(rows: int) -> tuple[float, float]:
    return 7.6, 2.3 + ROW_IN * max(rows, 3)


def _drawn(fig: Figure, alt: str) -> Drawn:
    return Drawn("data:image/png;base64," + base64.b64encode(to_png(fig)).decode(), " ".join(alt.split()))


def _spread(word: str, values: list[float], unit: str) -> str:
    if not values:
        return f"{word}: none."
    return f"{word}: {len(values)}, from {_number(min(values), unit)} to {_number(max(values), unit)}."


def _number(value: float, unit: str) -> str:
    return f"{plain_number(_round(value))} {unit}".rstrip()


def _round(value: float) -> float:
    """To 3 digits: medians of a room have no more."""
    return float(f"{value:.3g}")


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
