"""Tickets of a queue (labs.kit.turns): one small file per launch that waits or runs, locked for as long as it lives.

    waiting-<machine>-<place>-<pid>.json        mtime: last sign of life
    running-<machine>-<place>-<pid>.json        mtime: when it started

A ticket is locked before it gets its name, so whoever finds one unlocked knows that its owner is dead, and removes it
if the folder lets him. Files belong to many users: modes are set whatever the umask, files of others are opened without
O_CREAT (which fs.protected_regular forbids in a sticky folder), links and pipes are not followed, and what others wrote
is shown only as printable text.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LARGEST_BYTES = 64_000  # of a ticket: some 4000 cores
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NAME = re.compile(r"(waiting|running)-(\w+)-(\d{20})-(\d+)\.json")


@functools.cache
def machine() -> str:
    """A name of this machine, the same in all its containers until it is started again: a folder may be on NFS."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return re.sub(r"\W", "", socket.gethostname()) or "here"


@dataclass(frozen=True)
class Ticket:
    """A launch that somebody else has in the queue."""

    place: tuple[int, int]
    """Order of arrival: nanoseconds, less any head start, and process id."""
    running: bool
    since: float
    """Seconds of time.time() when it started or, if it waits, when it last gave a sign of life."""
    name: str
    what: str
    on: str
    claims: tuple[str, ...]
    pid: int | None
    """Process id, if it means anything here (containers number their own)."""

    def silent_s(self) -> float:
        """Seconds without a sign of life, of one that waits."""
        return time.time() - self.since

    def __str__(self) -> str:
        """For example "anna: data_parallel on 2 cores, for 12 s"."""
        for_s = f", for {max(0.0, time.time() - self.since):.0f} s" if self.running else ", next"
        return f"{self.name}: {self.what} on {self.on}{for_s}{self._stopped()}"

    def _stopped(self) -> str:
        try:
            if self.pid is not None and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return f" (stopped: whoever owns process {self.pid} must continue or kill it)"
        except (psutil.Error, ValueError, OverflowError):  # gone, or no process id at all
            pass
        return ""


def tell(before: Sequence[Ticket]) -> str:
    """What one who waits reads, for example "waiting: 2 launches before this one; anna: data_parallel on ..."."""
    if not before:
        return "waiting: another launch is about to end"
    running = [t for t in before if t.running] or before[:1]
    more = f"; and {len(running) - 3} more" if len(running) > 3 else ""
    count = f"{len(before)} launch{'es' if len(before) != 1 else ''} before this one"
    return "; ".join([f"waiting: {count}", *map(str, running[:3])]) + more


class Own:
    """This launch's ticket in `folder`. OSError if it cannot be written or locked."""

    def __init__(self, folder: Path, what: str, on: str, claims: Sequence[str], head_start_s: float) -> None:
        self.folder = folder
        # Of the monotonic clock, which all processes of a machine share: nobody overtakes when the time of day is set.
        self.place = (max(0, time.monotonic_ns() - int(head_start_s * 1e9)), os.getpid())
        self.path = folder / f"new-{secrets.token_hex(8)}.json"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(self.fd, 0o644)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = {"name": _own_name(), "what": what, "on": on, "claims": claims, "pid": os.getpid(), "pids": _pids()}
            os.write(self.fd, json.dumps(text).encode())
            self._rename("waiting")
        except BaseException:
            self.remove()
            raise

    def _rename(self, state: str) -> None:
        to = self.folder / f"{state}-{machine()}-{self.place[0]:020d}-{self.place[1]}.json"
        self.path.rename(to)
        self.path = to

    def beat(self) -> None:
        """Give a sign of life."""
        os.utime(self.fd)

    def start(self) -> None:
        """The wait is over."""
        self.beat()
        with contextlib.suppress(FileNotFoundError):  # somebody emptied the folder: the locks still hold
            self._rename("running")

    def remove(self) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        fcntl.flock(self.fd, fcntl.LOCK_UN)  # not only closed: a fork may hold a copy
        os.close(self.fd)


def living(folder: Path) -> list[Ticket]:
    """All tickets of this machine whose process is alive, by place; the others' are removed."""
    found = []
    for path in folder.iterdir():
        if path.name.startswith("new-"):
            _remove_if_old(path)
        elif (name := NAME.fullmatch(path.name)) and name[2] == machine() and (ticket := _read(path, name)):
            found.append(ticket)
    return sorted(found, key=lambda t: t.place)


def _read(path: Path, name: re.Match) -> Ticket | None:
    try:
        fd = os.open(path, READ)
    except OSError:  # its launch has ended meanwhile, or it is no file
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or _is_dead(fd, path):
            return None
        text = json.loads(os.read(fd, LARGEST_BYTES))
        here = text["pid"] if text["pids"] == _pids() and type(text["pid"]) is int else None
        return Ticket((int(name[3]), int(name[4])), name[1] == "running", facts.st_mtime, _clean(text["name"]),
                      _clean(text["what"]), _clean(text["on"]), tuple(map(str, text["claims"])), here)  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not one of ours: the locks decide
        return None
    finally:
        os.close(fd)


def _is_dead(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):  # of another user, in a sticky folder: he or its owner will remove it
        path.unlink()
    return True


def _remove_if_old(path: Path) -> None:
    """Between its creation and its lock a ticket lives for microseconds: one of a minute ago was killed there."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > 60:
            path.unlink()


def open_lock(path: Path) -> int:
    """Descriptor of a lock file that every user of this machine can lock; it is never removed."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            try:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except PermissionError:  # its maker died before the chmod below; reading is enough for a lock
                return os.open(path, READ)
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.fchmod(fd, 0o666)
            return fd


def locks_work(folder: Path) -> bool:
    """Whether a second lock on a locked file of `folder` is refused. OSError if files cannot be made or locked."""
    path = folder / f"new-{secrets.token_hex(8)}.json"
    with _closed(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)) as one:
        try:
            with _closed(os.open(path, READ)) as other:
                fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            path.unlink()
    return False


@contextlib.contextmanager
def _closed(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def _own_name() -> str:
    if name := os.environ.get("COURSE_NAME"):
        return name
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"user {os.getuid()}"


def _pids() -> str:
    """Which numbering of processes this is; the same text, the same numbers."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return socket.gethostname()


def _clean(text: object, most: int = 60) -> str:
    return "".join(c for c in str(text) if c.isprintable())[:most]
