"""Read a room: every learner's folder, whatever state its files are in.

Files that are cut short, malformed or foreign are named, one line each, and the rest goes on. Links are not followed:
a learner's folder could otherwise show the instructor's own files on the wall.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labs.kit import record
from labs.kit.errors import require
from labs.kit.record import KINDS, Records
from labs.kit.room import REVEALED, revealed_patterns

MAX_BYTES = 50_000_000  # of one file
MAX_CHARACTERS = 200  # of a text that a page shows
LARGEST = 1e100  # beyond it, sums and axes overflow; no quantity of the course comes near
STATES = ("passed", "not yet", "to do")


@dataclass
class Learner:
    """What one learner's folder holds, oldest first."""

    name: str
    preflight: dict[str, Any] | None = None
    runs: list[Records] = field(default_factory=list)
    """One per launch."""
    predictions: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Room:
    """All learners by name, and what could not be read: one line each."""

    folder: Path
    learners: list[Learner]
    problems: list[tuple[str, str]]
    """(learner's name or "", what is wrong)"""
    revealed: list[str]


def read_room(folder: Path) -> Room:
    """Everything in the room. BadInput if `folder` is none."""
    require(folder.is_dir(), f"{folder} is not a folder: name the one that learners have as COURSE_ROOM")
    room = Room(folder, [], [], [])
    for path in _entries(folder, room, ""):
        if path.is_symlink():
            room.problems.append(("", f"{shown(path.name)}: a link, not followed"))
        elif path.is_dir() and path.name.isprintable():
            room.learners.append(_read_learner(path, room))
        elif path.name != REVEALED:
            room.problems.append(("", f"{shown(path.name)}: no learner's folder, left out"))
    try:
        room.revealed = [shown(p) for p in revealed_patterns(folder)]
    except (OSError, ValueError) as e:
        room.problems.append(("", f"{REVEALED}: {_first(e)}; no solution is revealed until it is repaired"))
    return room


def signature(folder: Path) -> tuple[Any, ...]:
    """Changes when a file of the room does."""
    paths = [p for p in folder.glob("*/*") if not p.name.startswith(".")] + [folder / REVEALED]
    seen = []
    for path in sorted(paths):
        try:
            status = path.lstat()
        except OSError:
            continue
        seen.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(seen)


def _entries(folder: Path, room: Room, name: str) -> list[Path]:
    """What is in the folder, without hidden files: a file being written is hidden."""
    try:
        return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as e:
        room.problems.append((name, f"cannot be read: {e.strerror}"))
        return []


def _read_learner(folder: Path, room: Room) -> Learner:
    learner = Learner(folder.name)
    for path in _entries(folder, room, folder.name):
        try:
            for line in _read_file(path, learner):
                room.problems.append((folder.name, f"{shown(path.name)}, {line}"))
        except OSError as e:
            room.problems.append((folder.name, f"{shown(path.name)}: {e.strerror or _first(e)}"))
        except Exception as e:  # whatever a stranger's file makes of our parsers, the page is drawn
            text = _first(e, str(path)).lstrip(",: ")
            room.problems.append((folder.name, f"{shown(path.name)}: {text}"))
    learner.runs.sort(key=lambda run: str(run.provenance.get("utc")))
    learner.predictions.sort(key=lambda row: row["utc"])
    learner.outcomes.sort(key=lambda row: row["utc"])
    return learner


def _read_file(path: Path, learner: Learner) -> Iterator[str]:
    """Add a file to the learner; yields what is wrong in single lines of it. Raises if the whole file is useless."""
    if path.is_symlink() or not path.is_file():
        raise ValueError("no plain file, left out")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES / 1e6:.0f} MB, left out")
    if path.name == "preflight.json":
        learner.preflight = _preflight(path)
    elif path.suffix != ".jsonl":
        raise ValueError("not one of the course's files, left out")
    elif re.match(r"predictions-\d", path.name):
        yield from _rows(path, learner.predictions, _check_prediction)
    elif re.match(r"outcomes-\d", path.name):
        yield from _rows(path, learner.outcomes, _check_outcome)
    else:
        status = path.stat()
        learner.runs.append(_load(path, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=8192)
def _load(path: Path, _mtime_ns: int, _size: int) -> Records:
    """The records of a file, read once while it stays as it is."""
    return record.load(path)


def _preflight(path: Path) -> dict[str, Any]:
    report = json.loads(path.read_bytes())
    if not isinstance(report, dict) or report.get("verdict") not in ("GO", "NO-GO"):
        raise ValueError("no preflight report: run python -m labs.hardware_probe --preflight again")
    return report


def _rows(path: Path, into: list[dict[str, Any]], check: Any) -> Iterator[str]:
    """Append the good lines of a file, each with the machine of its first line; yields the bad ones."""
    machine: dict[str, Any] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("provenance"), dict):
                machine = row["provenance"]
                continue
            check(row)
            texts = {name: shown(text) for name, text in row.items() if isinstance(text, str)}
            into.append({**row, **texts, "machine": machine})
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            reason = "not JSON" if isinstance(e, json.JSONDecodeError | UnicodeDecodeError) else _first(e)
            yield f"line {number}: {reason}"


def _check_prediction(row: dict[str, Any]) -> None:
    for name in ("what", "unit", "utc", "kind"):
        _require_type(row, name, str)
    for name in ("predicted", "value", "low", "high"):
        number = row[name]
        if number is not None:
            _require_type(row, name, int | float)
            if isinstance(number, bool) or not abs(number) < LARGEST:
                raise ValueError(f"field {name!r}: a number below {LARGEST:g} needed")
    if row["predicted"] is None and row["value"] is None:
        raise ValueError("neither a prediction nor a measurement")
    if row["kind"] not in KINDS:
        raise ValueError(f"field 'kind': one of {', '.join(KINDS)} needed")
    if not shown(row["what"]).strip():
        raise ValueError("field 'what': a text needed")


def _check_outcome(row: dict[str, Any]) -> None:
    for name in ("exercise", "state", "feedback", "utc"):
        _require_type(row, name, str)
    if row["state"] not in STATES:
        raise ValueError(f"field 'state': one of {', '.join(STATES)} needed")


def _require_type(row: dict[str, Any], name: str, kind: Any) -> None:
    if not isinstance(row[name], kind):
        raise ValueError(f"field {name!r}: {getattr(kind, '__name__', 'a number')} needed")


def _first(error: BaseException, path: str = "") -> str:
    """The first line of an error's text, without the path of the file."""
    if isinstance(error, KeyError):
        return f"field {error} is missing"
    return shown((str(error).replace(path, "").strip().splitlines() or [type(error).__name__])[0])


def shown(value: object, most: int = MAX_CHARACTERS) -> str:
    """What a page can show of a text: one line, no control characters, not too long. "" for what is no text."""
    if not isinstance(value, str):
        return ""
    clean = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in value[:most])
    return clean if len(value) <= most else clean[:-1] + "…"
