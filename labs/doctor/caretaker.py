"""Ends all that a patient has started, and removes the run's folder. Also when the doctor itself is killed.

    python caretaker.py MARK FOLDER PLACE        # started by the doctor, never by hand

It waits, without using the processor, for its standard input to end: then the doctor has ended, whatever the cause.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "LABS_DOCTOR_RUN"
"""In the environment of a patient and of all that it starts. So they are found in sessions of their own, too."""
CLEANERS = ("resource_tracker", "torch_shm_manager")
"""They remove shared memory and semaphores when all others have ended, and end by themselves."""
GRACE_S = 3.0
"""After SIGTERM, and for cleaners."""
MOST_S = 10.0
POLL_S = 0.05


def family(mark: str) -> list[psutil.Process]:
    """Living processes of a run: that carry its mark, are in the session of one that does, or come from one.

    What has emptied its environment, made a session of its own, and lost its parent, is not found.
    """
    marked = [p for p in psutil.process_iter() if p.pid != os.getpid() and _carries(p, mark)]
    found = {p.pid: p for p in marked}
    sessions = {session for p in marked if (session := _session(p.pid))} - {_session(0)}
    for p in psutil.process_iter() if sessions else ():
        if _session(p.pid) in sessions:
            found[p.pid] = p
    for p in list(found.values()):
        with suppress(psutil.Error):
            found |= {child.pid: child for child in p.children(recursive=True)}
    return [p for p in found.values() if p.pid != os.getpid() and _lives(p)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # gone, or not ours
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end(mark: str, grace_s: float = GRACE_S) -> None:
    """SIGTERM to all of the family, then SIGKILL; cleaners come last. None is left, unless the system keeps it."""
    _send(family(mark), signal.SIGTERM)
    _wait(mark, grace_s, cleaners=False)
    until = time.monotonic() + MOST_S
    while time.monotonic() < until and _send(_workers(family(mark)), signal.SIGKILL):
        time.sleep(POLL_S)  # one may have started another meanwhile
    _wait(mark, GRACE_S, cleaners=True)
    _send(family(mark), signal.SIGKILL)
    _wait(mark, GRACE_S, cleaners=True)


def _workers(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if not _is_cleaner(p)]


def _is_cleaner(process: psutil.Process) -> bool:
    try:
        return any(name in word for word in process.cmdline() for name in CLEANERS)
    except psutil.Error:
        return False


def _send(processes: list[psutil.Process], signum: int) -> int:
    """To how many."""
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(signum)
    return len(processes)


def _wait(mark: str, seconds: float, *, cleaners: bool) -> None:
    """Until no process is left; `cleaners` or not."""
    until = time.monotonic() + seconds
    while (left := family(mark)) and (cleaners or _workers(left)) and time.monotonic() < until:
        time.sleep(POLL_S)


def sign(folder: Path, place: int, pid: int) -> None:
    """A doctor is at work in this folder: that of rank `place` of this machine."""
    (folder / f"doctor-{place}").write_text(str(pid))


def is_at_work(folder: Path, place: int) -> bool | None:
    """None if it has not come yet."""
    pid = _signed(folder / f"doctor-{place}")
    return None if pid is None else psutil.pid_exists(pid)


def at_work(folder: Path) -> dict[int, int]:
    """Process ids of the doctors of this machine's ranks, by place."""
    pids = {int(path.name.rpartition("-")[2]): _signed(path) for path in folder.glob("doctor-*")}
    return {place: pid for place, pid in pids.items() if pid is not None}


def _signed(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # it has gone, or is being written
        return None


def leave(folder: Path, place: int) -> None:
    """The last one to leave removes the folder."""
    (folder / f"doctor-{place}").unlink(missing_ok=True)
    others = [int(path.name.rpartition("-")[2]) for path in folder.glob("doctor-*")]
    if not any(is_at_work(folder, other) for other in others):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait, end, remove."""
    mark, folder, place = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(mark, grace_s=0.0)
    leave(folder, place)


if __name__ == "__main__":
    main()
