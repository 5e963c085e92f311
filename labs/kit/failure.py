"""The report of a failed rank: its traceback first, then the rank, the host and what to do next."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil

from labs.kit import supervise
from labs.kit.errors import BadInput

LOST_PEER = re.compile(
    r"onnection (closed|reset|refused)|Broken pipe|remote process exited|aborted|failed to recv", re.I
)
SERVER_KILLED = (
    "the process that starts ranks was killed, and all ranks with it: somebody ran kill -9, or the system ran out of "
    "memory (see `dmesg`). Run the cell again: the next launch starts a new one, which takes some seconds."
)


class RankFailed(RuntimeError):
    """A rank of a launch failed. `str()` gives its traceback, then one line with rank and host."""

    def __init__(self, message: str, *, rank: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.rank, self.host = rank, host

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints, without the launcher's frames, which don't help a learner."""
        return str(self).splitlines()


class RankTimeout(RankFailed):
    """The run was stopped at its time limit. The message says what each rank was doing."""


class Watch:
    """The folder of a run, in which ranks announce themselves, report errors and say when they're done."""

    def __init__(self, folder: Path, server: int | None = None) -> None:
        self.folder, self.server = folder, server
        self.since: float | None = None  # first sign that the run can't succeed, monotonic seconds
        self.died: int | None = None
        """The first rank that vanished without a report."""
        self.killed = False

    def pids(self) -> dict[int, int]:
        """Return the process id of each rank that has announced itself."""
        names = (p.name.split("-") for p in self.folder.glob("rank-*"))
        return {int(rank): int(pid) for _, rank, pid in names}

    def is_lost(self) -> bool:
        """Return whether a rank has failed, long enough ago to know which was first."""
        now = time.monotonic()
        reports = self.reports()
        if self.died is None:
            self.died = next((r for r, pid in self.pids().items() if _is_gone(pid) and not self._is_excused(r)), None)
        if self.since is None and (reports or self.died is not None):
            self.since = now
        # Leave the agent time to get a vanished rank's exit code. A lost connection is a symptom: wait for its cause.
        grace = 1.0 if self.died is not None or all(r["lost_peer"] for r in reports) else 0.05
        return self.since is not None and now - self.since > grace

    def _is_excused(self, rank: int) -> bool:
        return any((self.folder / f"{word}-{rank}").exists() for word in ("done", "error"))

    def reports(self) -> list[dict]:
        """Return the errors that ranks reported, oldest first; "lost_peer" says if it is a lost connection."""
        found = [json.loads(p.read_text()) for p in self.folder.glob("error-*")]
        return sorted(({**r, "lost_peer": bool(LOST_PEER.search(r["error"]))} for r in found), key=lambda r: r["time"])

    def output(self) -> str:
        """Return what the ranks printed, rank by rank."""
        files = sorted(self.folder.glob("output-*"), key=lambda p: int(p.name.rpartition("-")[2]))
        lines = (
            (p.name.rpartition("-")[2], line) for p in files for line in p.read_text(errors="replace").splitlines()
        )
        return "".join(f"[rank {rank}] {line}\n" for rank, line in lines)

    def failure(self, exit_codes: dict[int, int], agent_error: str) -> Exception:
        """Return the exception for a failed run: what the first failing rank reported, or how it died."""
        reports = self.reports()
        own = [r for r in reports if not r["lost_peer"]]
        if not own and self.server is not None and _is_gone(self.server):  # on Linux, all ranks die with it
            return RankFailed(SERVER_KILLED)
        died = self._died_first(exit_codes)
        if not own and died is not None:
            return _sudden_death(died, exit_codes.get(died), self._stack(died))
        if first := next(iter(own or reports), None):
            return _reported(first, len(reports) - 1)
        return RankFailed(f"the ranks did not start: {agent_error or 'see what was printed above'}")

    def _died_first(self, exit_codes: dict[int, int]) -> int | None:
        """Return the rank that died first. The agent knows it, unless `kill` ended the ranks."""
        silent = [rank for rank in exit_codes if not self._is_excused(rank)]
        return silent[0] if silent and not self.killed else self.died

    def kill(self) -> None:
        """End all ranks, because the run can't succeed."""
        self.killed = True
        supervise.kill(self.folder)

    def timeout(self, timeout_s: float, ranks: int) -> RankTimeout:
        """Return the exception for a run that took too long, with each rank's stack."""
        pids = self.pids()
        stopped = {rank for rank, pid in pids.items() if _status(pid) == psutil.STATUS_STOPPED}
        for rank, pid in pids.items():
            if rank not in stopped and not _is_gone(pid):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)  # faulthandler writes from the signal handler, even while a collective waits in C++
        lines = [self._where(rank, rank in stopped) for rank in range(ranks)]
        head = f"after timeout_s={timeout_s:g} the run was stopped. At that time"
        return RankTimeout("\n".join([head, *lines]), rank=min(stopped, default=None))

    def _where(self, rank: int, stopped: bool) -> str:
        if stopped:
            return f"rank {rank} was stopped (SIGSTOP or Ctrl-Z): the others waited for it"
        if (self.folder / f"done-{rank}").exists():
            return f"rank {rank} had finished and waited for the others"
        frames = self._stack(rank)
        if not frames:
            return f"rank {rank} had not started, or didn't respond"
        return f"rank {rank} was in, innermost first:\n  " + "\n  ".join(frames)

    def _stack(self, rank: int) -> list[str]:
        stack = self.folder / f"stack-{rank}"
        return _frames(stack.read_text(errors="replace")) if stack.exists() else []


def _frames(stack: str) -> list[str]:
    """Return the lines of a faulthandler stack, innermost first, up to the launcher's call of the lab."""
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    lines = [line for line in lines if "c10d_logger.py" not in line]  # wraps every collective
    entry = os.path.join("labs", "kit", "rank_process.py")
    ours = next((i for i, line in enumerate(lines) if entry in line), len(lines))
    return lines[:ours][:12]


def _status(pid: int) -> str | None:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def _is_gone(pid: int) -> bool:
    return _status(pid) in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _reported(first: dict, others: int) -> Exception:
    if first["bad_input"]:
        return BadInput(first["error"])
    after = f"; {others} other rank{'s' if others > 1 else ''} failed after it" if others else ""
    tail = f"rank {first['rank']} on {first['host']} failed first{after}."
    return RankFailed(f"{first['traceback'].rstrip()}\n{tail}", rank=first["rank"], host=first["host"])


def _sudden_death(rank: int, code: int | None, frames: list[str]) -> RankFailed:
    if code is None:
        return RankFailed(f"rank {rank} died without an error message. {_remedy(-signal.SIGKILL, [])}", rank=rank)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    return RankFailed(f"rank {rank} {how}. {_remedy(code, frames)}", rank=rank)


def _remedy(code: int, frames: list[str]) -> str:
    if code == -signal.SIGKILL:
        return "The system ran out of memory (`dmesg` shows that; try a smaller batch_size), or someone ran kill -9."
    if code == -signal.SIGBUS:
        return "It crashed below Python: a bus error usually means that /dev/shm is too small."
    if code in (-signal.SIGSEGV, -signal.SIGABRT):
        where = "\n  ".join(["in, innermost first:", *frames] if frames else ["in a thread that runs no Python"])
        return f"It crashed below Python, {where}"
    return "It called os._exit() itself, or a library did."
