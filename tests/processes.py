"""Finding what a launch leaves behind: processes by a mark in their environment, ports, files."""

import os
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

MARK = "LABS_TEST_MARK"
SURVIVAL_S = 6.0  # the contract is 3 s; twice that, for a machine that is busy with other things
HERE = Path(__file__).parent
os.environ.setdefault(MARK, uuid.uuid4().hex)  # inherited by what this process starts, its fork server included


def new_environment(**more: str) -> dict[str, str]:
    """An environment for a process whose whole family is to be found again."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, MARK: uuid.uuid4().hex, "PYTHONPATH": path, **more}


def family(mark: str) -> list[psutil.Process]:
    """Living processes that carry `mark`, other than this one."""
    return [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:  # gone, or not ours
        return False


def is_backstage(process: psutil.Process, launcher: int) -> bool:
    """Whether this is the watcher, fork server or resource tracker that stays for the next launch."""
    try:
        command = " ".join([process.name(), *process.cmdline()])  # by name: the fork server of a command
        known = any(word in command for word in ("supervise.py", "forkserver", "resource_tracker"))
        return known and process.ppid() == launcher
    except psutil.NoSuchProcess:
        return True


def survivors(mark: str, launcher: int | None = None) -> list[psutil.Process]:
    """Processes of the family that should not be there; `launcher` is the pid that may still have its backstage."""
    return [p for p in family(mark) if p.pid != launcher and not (launcher and is_backstage(p, launcher))]


def assert_no_survivors(mark: str, launcher: int | None = None) -> float:
    """Seconds until no process was left; AssertionError names those that are still there after SURVIVAL_S."""
    start = time.monotonic()
    while left := survivors(mark, launcher):
        if time.monotonic() - start > SURVIVAL_S:
            raise AssertionError(f"still there after {SURVIVAL_S} s: {[describe(p) for p in left]}")
        time.sleep(0.02)
    return time.monotonic() - start


def describe(process: psutil.Process) -> str:
    """One line about a process, also if it has gone meanwhile."""
    try:
        return f"{process.pid} (parent {process.ppid()}, {process.status()}) {' '.join(process.cmdline())[:90]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def free_port() -> int:
    """A TCP port of this machine that nobody listens on, a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def listening(pid: int | None = None) -> set[int]:
    """TCP ports that process `pid` (default: this one) listens on."""
    connections = psutil.Process(pid).net_connections("inet")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def leftovers(folder: str | os.PathLike | None = None) -> set[str]:
    """Names that launches of this user may have left in the folder for temporary files."""
    patterns = ("labs-*", "pytorch-errorfile-*", "torchelastic_*", "pymp-*")
    return {p.name for pattern in patterns for p in Path(folder or tempfile.gettempdir()).glob(pattern)}


def wait_for(condition, seconds: float = 60.0, what: str = "") -> object:
    """What `condition()` returns once it is true. A generous limit: it only ends tests that would hang."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what or condition}"
        time.sleep(0.02)
    return found


PYTHON = [sys.executable, "-B"]
