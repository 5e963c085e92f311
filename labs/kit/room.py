"""A room: a shared folder that collects learners' measurements, predictions and solutions for their instructor.

    COURSE_ROOM=/shared/room COURSE_NAME=Ada make lab         # the learner's choice
    python -m labs.classroom /shared/room                     # the instructor's page

Without COURSE_ROOM nothing is written. With it, a full, read-only, missing or slow room costs one line on stderr and
half a second per session, but never a cell: a background thread writes the files.
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
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labs.kit import hardware
from labs.kit.record import Record, Records, plain, write_atomic

ROOM, NAME = "COURSE_ROOM", "COURSE_NAME"
REVEALED = "revealed.json"
WAIT_S, PATIENCE = 0.5, 2  # seconds a cell waits for the share, and how often per session
READ_S = 2.0  # wait for a folder or a solution
SLOW_S = 5.0  # without an answer, after which the learner gets a warning
FLUSH_S = 3.0  # wait for unwritten files when a kernel ends
MAX_PENDING = 200  # files held in memory while the share doesn't answer


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
    return here is None or not here.in_time(here.read_revealed, READ_S) or matches(exercise_id, here.patterns)


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
        self.room, self.folder = room, room / name
        self.token = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        self.count = itertools.count(1)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.patterns: list[str] = []
        self.pending: dict[str, Callable[[], str]] = {}
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.problem, self.said, self.pid = "", set[str](), os.getpid()
        self.began, self.patience = 0.0, PATIENCE
        atexit.register(self._flush)

    def write(self, name: str, text: Callable[[], str]) -> None:
        """Write file `name` in the background, and with it any that couldn't be written before."""
        with self.lock:
            self.pending[name] = text
            while len(self.pending) > MAX_PENDING:
                self.pending.pop(next(iter(self.pending)))
        self.in_time(self._write_pending)

    def in_time(self, work: Callable[[], None], wait_s: float | None = None) -> bool:
        """Do `work` in a thread; return whether it was done in time. Prints a problem only once.

        `wait_s` None is for a cell that writes: it waits WAIT_S, and no longer at all after PATIENCE timeouts.
        """
        patient = self.patience > 0 or wait_s is not None
        if not self._free(wait_s or WAIT_S * patient):
            return False
        self.began, self.thread = time.monotonic(), threading.Thread(target=self._guarded, args=(work,), daemon=True)
        self.thread.start()
        if not self._free(wait_s or WAIT_S * patient):
            return False
        if self.problem:
            self._say("warning", f"{ROOM}: {self.problem}; the course continues without it")
        else:
            self._say(
                "notice",
                f"{ROOM} is set: your measurements, predictions and exercise outcomes are kept in "
                f"{self.folder}, for your instructor and all who can read that folder. Nothing is sent anywhere "
                f"else. To stop: %env {ROOM}= in a cell, or unset {ROOM} before you start",
            )
        return not self.problem

    def _free(self, wait_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        if self.thread is not None:
            self.thread.join(wait_s)
        if self.thread is None or not self.thread.is_alive():
            return True
        self.patience -= 1
        if time.monotonic() - self.began > SLOW_S:
            self._say(
                "warning",
                f"{ROOM}: {self.room} does not answer. The course continues; unsaved results follow as soon as it does",
            )
        return False

    def make_folder(self) -> None:
        """Make the learner's folder. Making the room would hide a share that isn't mounted."""
        if not self.room.is_absolute():
            raise ValueError(f"{self.room} is not an absolute path such as /shared/room")
        if not self.room.is_dir():
            raise ValueError(f"there is no folder {self.room} here (is the share mounted?)")
        self.folder.mkdir(exist_ok=True)

    def read_revealed(self) -> None:
        """Read `patterns`; an invalid list reveals nothing."""
        self.make_folder()
        self.patterns = []
        with contextlib.suppress(ValueError):
            self.patterns = revealed_patterns(self.room)

    def _write_pending(self) -> None:
        self.make_folder()
        while True:
            with self.lock:
                name, text = next(iter(self.pending.items()), (None, None))
            if name is None:
                return
            write_atomic(self.folder / name, text())
            with self.lock:
                if self.pending.get(name) is text:
                    del self.pending[name]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.problem = ""
        except OSError as e:
            self.problem = f"nothing can be kept in {self.folder} ({e.strerror or type(e).__name__})"
        except Exception as e:
            self.problem = f"{e}".partition("\n")[0]

    def _say(self, topic: str, line: str) -> None:
        if topic not in self.said:
            self.said.add(topic)
            print(line, file=sys.stderr, flush=True)

    def _flush(self) -> None:
        """At exit, wait a little for unwritten files, then abandon the thread: the share may never answer."""
        if not self.pending or self.thread is None or os.getpid() != self.pid:
            return
        self.thread.join(FLUSH_S)
        if not self.thread.is_alive() and not self.problem:  # it ended just before the last file was added
            self._guarded(self._write_pending)
        if self.pending:
            self._say("warning", f"{ROOM}: {len(self.pending)} file(s) could not be kept in {self.folder}")
