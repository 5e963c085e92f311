"""Drills of exercise 05.1: an act runs in a forked process that is watched, killed at a call or a byte, or out of disk.

What happens there is real: the kernel sends the SIGKILL, and RLIMIT_FSIZE ends or fails the write at the given byte,
also where torch writes from C++. Only fsync does nothing but be noted, so that a check takes a second on any disk.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labs.kit.check import Mistake, error_text
from labs.kit.guardian import end_with_parent

LIMIT_S = 15.0
"""How long one act may take; saving the small states of this exercise takes milliseconds."""
WRITES = {
    "open",
    "rename",
    "replace",
    "link",
    "symlink",
    "remove",
    "unlink",
    "mkdir",
    "rmdir",
    "fsync",
    "fdatasync",
    "sync",
}


@dataclass(frozen=True)
class Call:
    """One call that changes files, or makes a change last."""

    what: str
    paths: tuple[str, ...]
    files: dict[str, int]
    """{inode: bytes on disk} just before the call, of the file, of all files in the folder, or of fsync's file."""


@dataclass(frozen=True)
class Drill:
    """What goes wrong while the act runs; by default nothing does."""

    kill_at_call: int | None = None
    """SIGKILL just before this call, counted from 0."""
    kill_at_byte: int | None = None
    """Killed by the kernel in the write that would make a file longer than this."""
    full_at_byte: int | None = None
    """That write fails with an OSError instead."""
    fsync_fails: bool = False


@dataclass(frozen=True)
class Ended:
    """How an act ended."""

    killed: bool
    error: str = ""
    """What it raised, as "OSError: ..."; "" if nothing."""
    calls: list[Call] = field(default_factory=list)
    """All its calls; none if it was killed."""


def in_child(act: Callable[[], Any], drill: Drill = Drill(), using: Iterable[dict[str, Any]] = ()) -> Ended:
    """Run `act()` in a forked process. Mistake if it does not end.

    `using`: namespaces of the learner's code, whose own names for calls of `os` are watched too.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child runs this one act and ends
        parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            end_with_parent(parent)  # a kernel that is killed would leave an endless save() behind
            _live(act, drill, using, writing)
        finally:
            os._exit(1)  # whatever a learner's error does when it is told: there must not be two of this process
    os.close(writing)
    try:
        text = _read(reading)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        _, status = os.waitpid(pid, 0)
    if not text and os.WIFSIGNALED(status):
        return Ended(killed=True)
    if not text:
        raise Mistake(
            "your code ends the whole process with os._exit(): the training is gone, and nobody learns why",
            "raise, or let the OSError through",
        )
    told = json.loads(text)
    return Ended(killed=False, error=told["error"], calls=[Call(w, tuple(p), f) for w, p, f in told["calls"]])


def _read(descriptor: int) -> str:
    """All that the child tells. Mistake after LIMIT_S."""
    parts, deadline = [], time.monotonic() + LIMIT_S
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, 65536)
        if not part:
            return b"".join(parts).decode()
        parts.append(part)
    raise Mistake(f"save() of a state of 100 kB did not end within {LIMIT_S:g} s", "look for a loop that never ends")


def _live(act: Callable[[], Any], drill: Drill, using: Iterable[dict[str, Any]], writing: int) -> None:
    """All of the child's life. It leaves by _exit: nothing of the parent, such as half a line, is printed twice."""
    error, watch = "", _Watch(drill)
    try:
        _be_quiet()
        watch.install(using)
        _limit(drill)
        act()
    except BaseException as e:
        error = f"{type(e).__name__}: {error_text(e)}".splitlines()[0][:300]
    watch.over = True
    told = json.dumps({"error": error, "calls": [[c.what, c.paths, c.files] for c in watch.calls]}).encode()
    while told:  # a pipe takes 64 kB at once
        told = told[os.write(writing, told) :]
    os._exit(0)


def _be_quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr = io.StringIO()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _limit(drill: Drill) -> None:
    import resource  # not on Windows

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    limit = drill.kill_at_byte if drill.kill_at_byte is not None else drill.full_at_byte
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if drill.kill_at_byte is not None else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class _Watch:
    """Stands in for the calls of `os` and for open() in the child, for good."""

    def __init__(self, drill: Drill) -> None:
        self.drill, self.calls, self.over, self.inside = drill, [], False, False
        self.real: dict[int, tuple[Callable, Callable]] = {}

    def install(self, using: Iterable[dict[str, Any]]) -> None:
        for name in WRITES - {"open"}:
            self.stand_in(os, name, name)
        self.stand_in(os, "open", "open")
        self.stand_in(builtins, "open", "open")
        io.open = builtins.open
        for namespace in using:
            for name, value in list(namespace.items()):
                real, mine = self.real.get(id(value), (None, None))
                if real is not None and real is value:
                    namespace[name] = mine

    def stand_in(self, module: Any, name: str, what: str) -> None:
        real = getattr(module, name)

        @functools.wraps(real)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.over or self.inside or not _changes(what, args, kwargs):
                return real(*args, **kwargs)
            self.note(what, _with_their_folders((*args, *kwargs.values()), kwargs))
            if what in ("fsync", "fdatasync", "sync"):
                return None
            return real(*args, **kwargs)

        self.real[id(real)] = (real, watched)
        setattr(module, name, watched)

    def note(self, what: str, args: tuple) -> None:
        if len(self.calls) == self.drill.kill_at_call:
            os.kill(os.getpid(), signal.SIGKILL)
        self.inside = True
        paths = tuple(os.path.abspath(os.fsdecode(a)) for a in args[:2] if isinstance(a, (str, bytes, os.PathLike)))
        target = paths[0] if paths else args[0] if args else None
        self.calls.append(Call(what, paths if what != "open" else paths[:1], _sizes(target)))
        self.inside = False
        if what in ("fsync", "fdatasync") and self.drill.fsync_fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _with_their_folders(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """The arguments, with a name that is relative to an open folder put behind that folder's path."""
    folders = [kwargs.get("src_dir_fd", kwargs.get("dir_fd")), kwargs.get("dst_dir_fd")]
    if not any(isinstance(folder, int) for folder in folders) or not os.path.isdir("/proc/self/fd"):
        return args
    named = [
        a if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(a))
        for a, folder in zip(args, folders, strict=False)
    ]
    return (*named, *args[len(named) :])


def _changes(what: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """False for an open() that only reads, and for one that gives a name to a descriptor."""
    if what != "open":
        return True
    mode = kwargs.get("mode", kwargs.get("flags", args[1] if len(args) > 1 else "r"))
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return not isinstance(args[0] if args else 0, int) and bool(set(mode) & set("wax+"))


def _sizes(target: Any) -> dict[str, int]:
    """{inode: bytes} of a path, of all files below it, or of a descriptor; nothing where there is none."""
    try:
        if hasattr(target, "fileno"):
            target = target.fileno()
        here = os.stat(target)
        if isinstance(target, int) or not os.path.isdir(target):
            return {str(here.st_ino): here.st_size}
        inside = [p.stat() for p in Path(os.fsdecode(target)).rglob("*") if p.is_file()]
        return {str(here.st_ino): 0} | {str(s.st_ino): s.st_size for s in inside}
    except (OSError, TypeError, ValueError):
        return {}
