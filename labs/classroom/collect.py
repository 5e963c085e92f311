"""Read a room: every learner's folder, whatever state its files are in.

A truncated, malformed or foreign file becomes one line in `Room.problems`. Links aren't followed, since a learner's
link could show the instructor's files.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labs.kit.errors import require
from labs.kit.room import REVEALED, revealed_patterns

MAX_BYTES = 50_000_000  # of one file
STATES = ("passed", "not yet", "to do")
COMPARED = ("python", "torch", "jupyterlab", "ipykernel")


@dataclass
class Learner:
    """The contents of one learner's folder, oldest first."""

    name: str
    preflight: dict[str, Any] | None = None
    predictions: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Room:
    """All learners by name, the solutions revealed to them, and one line per unreadable file."""

    folder: Path
    learners: list[Learner] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    revealed: list[str] = field(default_factory=list)


def read_room(folder: Path) -> Room:
    """Read everything in the room. Raises BadInput if `folder` isn't a folder."""
    require(folder.is_dir(), f"{folder} is not a folder: name the one that learners have as COURSE_ROOM")
    room = Room(folder)
    for path in _entries(folder):
        if path.is_dir() and not path.is_symlink():
            room.learners.append(learner := Learner(shown(path.name)))
            for file in _entries(path):
                try:
                    _read_file(file, learner)
                except Exception as e:  # whatever a foreign file does to our parsers, the page must appear
                    room.problems.append(f"{learner.name}: {shown(file.name)}: {_first_line(e)}")
            learner.predictions.sort(key=lambda row: row["utc"])
            learner.outcomes.sort(key=lambda row: row["utc"])
        elif path.name != REVEALED:
            room.problems.append(f"{shown(path.name)}: not a learner's folder")
    try:
        room.revealed = [shown(p) for p in revealed_patterns(folder)]
    except (OSError, ValueError) as e:
        room.problems.append(f"{REVEALED}: {_first_line(e)}; no solution is revealed until it is repaired")
    return room


def signature(folder: Path) -> tuple[Any, ...]:
    """Return a value that changes when a file in the room does."""
    files = [p for p in (*folder.glob("*/*"), folder / REVEALED) if p.is_file() and not p.name.startswith(".")]
    return tuple((str(p), p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(files))


def _entries(folder: Path) -> list[Path]:
    """Return the folder's entries except hidden ones, which include files being written."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def _read_file(path: Path, learner: Learner) -> None:
    """Add a file to the learner. Raises with the reason if it can't be used."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ValueError("a link, a folder, or too large")
    topic = path.name.partition("-")[0]
    if path.name == "preflight.json":
        learner.preflight = json.loads(path.read_bytes())
        if learner.preflight["verdict"] not in ("GO", "NO-GO"):
            learner.preflight = None
            raise ValueError("not a preflight report")
    elif topic in ("predictions", "outcomes"):
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        check, into = (_prediction, learner.predictions) if topic == "predictions" else (_outcome, learner.outcomes)
        # A prediction of None is undecided
        into += [check(row) for row in rows if "provenance" not in row and row.get("predicted", 0) is not None]
    elif path.suffix != ".jsonl":  # other .jsonl files are records of launches, for the learner
        raise ValueError("not one of the course's files")


def _prediction(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {k: row[k] if row[k] is None else float(row[k]) for k in ("predicted", "value", "low", "high")}
    if not all(v is None or math.isfinite(v) for v in numbers.values()) or numbers["predicted"] is None:
        raise ValueError("a prediction that isn't a number")
    return {**numbers, **{k: shown(row[k] or "") for k in ("what", "unit", "kind", "notebook", "utc")}}


def _outcome(row: dict[str, Any]) -> dict[str, Any]:
    if row["state"] not in STATES:
        raise ValueError(f"state must be one of {', '.join(STATES)}")
    return {k: shown(row[k]) for k in ("exercise", "state", "feedback", "utc")}


def _first_line(error: BaseException) -> str:
    text = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
    return shown((text.strip().splitlines() or [type(error).__name__])[0])


def shown(value: object, most: int = 200) -> str:
    """Return a text in a form fit for the page: one line, printable, not too long."""
    clean = "".join(c if c.isprintable() else " " for c in str(value))
    return clean if len(clean) <= most else clean[: most - 1] + "…"


# What the page shows


@dataclass(frozen=True)
class Ready:
    """One learner's preflight. `notes`: what to fix, and which versions differ from most of the room's."""

    name: str
    verdict: str
    notes: tuple[str, ...]
    machine: str


def readiness(learners: list[Learner]) -> list[Ready]:
    """Return one row per learner, those who need help first."""
    versions = {learner.name: _versions(learner.preflight) for learner in learners if learner.preflight}
    usual = {
        key: Counter(v[key] for v in versions.values()).most_common(1)[0][0]
        for key in ("course", *COMPARED)
        if versions
    }
    rows = []
    for learner in learners:
        if (report := learner.preflight) is None:
            rows.append(Ready(learner.name, "not run", (), ""))
            continue
        other = [f"{k} {v}, most have {usual[k]}" for k, v in versions[learner.name].items() if v != usual[k]]
        notes = (*(shown(r) for r in report.get("reasons", [])), *other)
        rows.append(Ready(learner.name, report["verdict"], notes, machine_of(report.get("machine") or {})))
    order = {"NO-GO": 0, "not run": 1, "GO": 2}
    return sorted(rows, key=lambda r: (order[r.verdict], not r.notes, r.name))


def _versions(report: dict[str, Any]) -> dict[str, str]:
    found = report.get("versions") or {}
    return {"course": shown(report.get("course")), **{k: shown(found.get(k)) for k in COMPARED}}


def machine_of(facts: dict[str, Any]) -> str:
    """Return the hardware's name, for example "2 x NVIDIA L4" or "Xeon 8481C, 8 cores"."""
    if names := [shown(g["name"]) for g in facts.get("gpus") or []]:
        return " + ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(names).items())
    return f"{shown(facts['cpu'])}, {facts.get('cores')} cores" if "cpu" in facts else ""


@dataclass(frozen=True)
class Question:
    """A predicted quantity, with each learner's latest (name, prediction, result or None), by name."""

    what: str
    unit: str
    notebook: str
    answers: tuple[tuple[str, float, float | None], ...]

    @property
    def medians(self) -> tuple[float, float | None]:
        """The median prediction and the median result (None if there is none)."""
        results = [r for _, _, r in self.answers if r is not None]
        return statistics.median(p for _, p, _ in self.answers), statistics.median(results) if results else None


def questions(learners: list[Learner]) -> list[Question]:
    """Return all questions that anyone answered, by notebook."""
    latest: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    notebooks: dict[tuple[str, str], str] = {}
    for learner in learners:
        for row in learner.predictions:
            key = row["what"], row["unit"]
            notebooks[key] = row["notebook"] or notebooks.get(key, "")
            if row["value"] is not None or latest[key].get(learner.name, row)["value"] is None:
                latest[key][learner.name] = row  # a prediction without a result doesn't replace one that has it
    return sorted(
        (
            Question(*key, notebooks[key], tuple((n, r["predicted"], r["value"]) for n, r in sorted(rows.items())))
            for key, rows in latest.items()
        ),
        key=lambda q: (q.notebook, q.what),
    )


@dataclass(frozen=True)
class Progress:
    """How many learners are in each state of one exercise, by their latest check, and the most frequent feedback."""

    exercise: str
    states: dict[str, int]
    feedback: list[tuple[str, int]]


def progress(learners: list[Learner]) -> list[Progress]:
    """Return all exercises that anyone has checked, in order."""
    latest: dict[str, dict[str, str]] = defaultdict(dict)
    met: dict[str, Counter[str]] = defaultdict(Counter)
    for learner in learners:
        for row in learner.outcomes:
            latest[row["exercise"]][learner.name] = row["state"]
        for exercise, line in {(r["exercise"], r["feedback"]) for r in learner.outcomes if r["feedback"]}:
            met[exercise][line] += 1
    return [
        Progress(e, {s: list(latest[e].values()).count(s) for s in STATES}, met[e].most_common(3))
        for e in sorted(latest)
    ]
