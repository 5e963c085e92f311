"""A room: a shared folder that collects learners' measurements, predictions and solutions for their instructor.

    COURSE_ROOM=/shared/room COURSE_NAME=Ada make lab         # the learner's choice
    python -m labs.classroom /shared/room                     # the instructor's page

Without COURSE_ROOM nothing is written. With it, a full, read-only, missing or slow room costs one line on stderr, but
never a cell: a background thread writes the files.
"""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import functools
import getpass
import importlib.metadata
import itertools
import json
import math
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labs.kit import hardware
from labs.kit.record import Record, Records, plain, write_atomic

ROOM, NAME = "COURSE_ROOM", "COURSE_NAME"
REVEALED = "revealed.json"
WAIT_S = 0.5  # a cell's wait for the share
READ_S = 2.0  # wait for a folder or a solution
FLUSH_S = 3.0  # wait for unwritten files when a kernel ends


def own_folder() -> Path | None:
    """Return COURSE_ROOM/<name>, made if missing; None without a room or, after one warning, if it fails."""
    here = _session()
    return here.folder if here and here.in_time(here.make_folder, READ_S) else None


def keep_records(records: Iterable[Record]) -> None:
    """Save the records of one launch as a separate file."""
    here, kept = _session(), Records(records)
    if here and kept:
        here.write(f"{safe_name(kept[0].lab)}-{here.token}-{next(here.count)}.jsonl", lambda: "".join(kept.lines()))


def keep_prediction(
    what: str,
    unit: str,
    predicted: float,
    value: float | None = None,
    low: float | None = None,
    high: float | None = None,
    kind: str = "measured",
) -> None:
    """Save a prediction and, once known, the result and its interval, all in `unit`. NaN means no prediction."""
    numbers = {"predicted": predicted, "value": value, "low": low, "high": high}
    finite = {k: None if v is None or not math.isfinite(v) else float(v) for k, v in numbers.items()}
    notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).stem or None  # set by Jupyter's server
    _keep("predictions", {"what": what, "unit": unit, **finite, "kind": kind, "notebook": notebook})


def keep_outcome(exercise_id: str, state: str, feedback: str = "") -> None:
    """Save the outcome of one check: "to do", "passed" or "not yet", and the first line of the feedback."""
    _keep("outcomes", {"exercise": exercise_id, "state": state, "feedback": feedback.partition("\n")[0]})


def revealed(exercise_id: str) -> bool:
    """Return True without a room, or if the instructor has revealed this solution. A courtesy, not a lock."""
    here = _session()
    if here is None:
        return True
    patterns: list[str] = []

    def read() -> None:
        here.make_folder()
        with contextlib.suppress(ValueError):  # an invalid list reveals nothing
            patterns.extend(revealed_patterns(here.room))

    return not here.in_time(read, READ_S) or matches(exercise_id, patterns)


def matches(exercise_id: str, patterns: Iterable[str]) -> bool:
    """Return whether "03.1" matches one of the patterns, such as "03.1", "03.*" or "all"."""
    return any(p == "all" or fnmatch.fnmatchcase(exercise_id, p) for p in patterns)


def revealed_patterns(room: Path) -> list[str]:
    """Return what the instructor has revealed in this room. ValueError if the file isn't a valid list."""
    try:
        given = json.loads((room / REVEALED).read_bytes())["revealed"]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, RecursionError):
        raise ValueError('needs {"revealed": [...]}') from None
    if not (isinstance(given, list) and all(isinstance(p, str) for p in given)):
        raise ValueError('needs {"revealed": ["03.1", "04.*"]}')
    return given


def safe_name(text: str) -> str:
    """Return `text` as a file name: letters, digits and . @ + - _, at most 80 bytes."""
    clean = re.sub(r"[^\w.@+-]+", "_", text).encode()[:80].decode(errors="ignore").strip("._")
    return clean or "learner"


def _keep(topic: str, row: dict[str, Any]) -> None:
    """Rewrite the file of one topic and kernel. Two kernels of a learner never share a file."""
    here = _session()
    if here is None:
        return
    rows = here.rows.setdefault(topic, [])
    rows.append({**plain(row), "utc": datetime.now(UTC).isoformat(timespec="seconds")})
    lines = tuple(rows)
    here.write(
        f"{topic}-{here.token}.jsonl",
        lambda: "".join(json.dumps(line, allow_nan=False) + "\n" for line in ({"provenance": _machine()}, *lines)),
    )


def _machine() -> dict[str, Any]:
    """Return as much of the provenance as is known without `import torch`, which takes seconds."""
    return {**hardware.summary(), "torch": importlib.metadata.version("torch")}


def _session() -> _Session | None:
    """Return this process's session in the room. A forked child has its own, with its own thread."""
    room = os.environ.get(ROOM, "").strip()
    return _session_in(room, os.environ.get(NAME, "").strip(), os.getpid()) if room else None


@functools.cache
def _session_in(room: str, name: str, _pid: int) -> _Session:
    return _Session(Path(room).expanduser(), safe_name(name or _user_at_host()))


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"user{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


class _Session:
    """One kernel or command in one room."""

    def __init__(self, room: Path, name: str) -> None:
        self.room, self.folder, self.pid = room, room / name, os.getpid()
        self.token = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        self.count = itertools.count(1)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.pending: dict[str, Callable[[], str]] = {}
        self.thread: threading.Thread | None = None
        self.said = set[str]()
        atexit.register(self.flush)

    def write(self, name: str, text: Callable[[], str]) -> None:
        """Write file `name` in the background, and with it any that couldn't be written before."""
        self.pending[name] = text
        if self.thread is None or not self.thread.is_alive():  # a thread that still waits for the share writes it
            self.in_time(self._write_pending, WAIT_S)

    def in_time(self, work: Callable[[], None], wait_s: float) -> bool:
        """Do `work` in a thread; return whether it was done within `wait_s`. Prints each problem only once."""
        problems: list[str] = []

        def guarded() -> None:
            try:
                work()
            except OSError as e:
                problems.append(f"nothing can be kept in {self.folder} ({e.strerror})")
            except ValueError as e:
                problems.append(str(e))

        self.thread = threading.Thread(target=guarded, daemon=True)
        self.thread.start()
        self.thread.join(wait_s)
        if self.thread.is_alive():
            problems = [f"{self.room} does not answer, results follow as soon as it does"]
        if problems:
            self._say("warning", f"{ROOM}: {problems[0]}; the course continues without it")
        else:
            self._say(
                "notice",
                f"{ROOM} is set: your measurements, predictions and exercise outcomes are kept in "
                f"{self.folder}, for your instructor and all who can read that folder. Nothing is sent anywhere "
                f"else. To stop: %env {ROOM}= in a cell, or unset {ROOM} before you start",
            )
        return not problems

    def make_folder(self) -> None:
        """Make the learner's folder. Making the room would hide a share that isn't mounted."""
        if not self.room.is_absolute():
            raise ValueError(f"{self.room} is not an absolute path such as /shared/room")
        if not self.room.is_dir():
            raise ValueError(f"there is no folder {self.room} here (is the share mounted?)")
        self.folder.mkdir(exist_ok=True)

    def _write_pending(self) -> None:
        self.make_folder()
        while self.pending:
            for name, text in list(self.pending.items()):
                write_atomic(self.folder / name, text())
                if self.pending.get(name) is text:
                    del self.pending[name]

    def _say(self, topic: str, line: str) -> None:
        if topic not in self.said:
            self.said.add(topic)
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """At exit, wait a little for unwritten files, then abandon the thread: the share may never answer."""
        if not self.pending or self.thread is None or os.getpid() != self.pid:
            return
        self.thread.join(FLUSH_S)
        if not self.thread.is_alive():
            with contextlib.suppress(OSError, ValueError):
                self._write_pending()
        if self.pending:
            print(f"{ROOM}: {len(self.pending)} file(s) could not be kept in {self.folder}", file=sys.stderr)
