"""A thread in each rank that notices when all ranks stop moving, and makes each write what it was doing.

Ranks communicate through the store where they meet: torchrun's, or rank 0's. Imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from labs.kit.place import Place
from labs.watch import evidence
from labs.watch.activity_probe import ActivityProbe

LOOKS = 20  # minimum number of looks within the patience; at least one per second
STORE_S = 5.0
"""Maximum wait for an answer from the shared store."""
GRACE_S = 2.0
"""Time for the other ranks to write, before this one exits or reports."""


class Board:
    """Counters that all ranks share. `add` returns None while ranks can't reach each other."""

    def __init__(self, place: Place) -> None:
        self.place, self.store = place, None
        self.local: dict[str, int] = {}

    def add(self, name: str, by: int) -> int | None:
        """Add to a counter and return its new value."""
        if self.place.ranks == 1:
            self.local[name] = self.local.get(name, 0) + by
            return self.local[name]
        try:
            self.store = self.store or self._connect()
            # torchrun's store survives restarts, so each start has its own counters
            return self.store and self.store.add(f"labs.watch/{self.place.restart}/{name}", by)
        except (RuntimeError, KeyError):  # it has gone, or is too slow; or srun set ranks but nothing set a store
            self.store = None
            return None

    def _connect(self) -> Any:
        """Connect for this thread only: the program's connection is blocked while the program waits."""
        distributed = sys.modules.get("torch.distributed")
        if not hasattr(distributed, "TCPStore") or not hasattr(distributed, "is_initialized"):
            return None  # the program hasn't loaded it yet
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not (by_agent or distributed.is_initialized()):
            return None  # rank 0 hasn't opened it yet
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=STORE_S)
        return distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


class Watchdog:
    """Watches a rank after `start()`. `diagnose(folder)` yields the lines to print about a folder of evidence."""

    def __init__(self, folder: Path, patience_s: float, diagnose: Callable[[Path], Iterable[str]], prog: str) -> None:
        self.place = Place.of(os.environ, one_machine=True)
        self.folder = folder / f"restart{self.place.restart}" if self.place.restart else folder
        self.patience_s, self.diagnose, self.prog = patience_s, diagnose, prog
        self.board, self.probe = Board(self.place), ActivityProbe()
        self.pid, self.lock, self.over = os.getpid(), threading.Lock(), threading.Event()
        self.called_for, self.failures = 0, 0  # counts of other ranks' events that this one has handled
        self.still = self.has_evidence = self.ended = self.failed = False

    def start(self) -> None:
        """Start the thread before the program loads torch, which reads the recorder's settings once."""
        evidence.clear(self.folder, self.place.rank, self.place.ranks)
        if self.place.ranks > 1:
            self.folder.mkdir(parents=True, exist_ok=True)  # torch doesn't create the folder for its dump
            evidence.arm(self.folder, self.place.rank)  # because NCCL's watchdog aborts the process
        for name, value in evidence.recorder_settings(self.folder, os.environ).items():
            os.environ.setdefault(name, value)
        self.thread = threading.Thread(target=self._watch, name="labs.watch", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        progress, since = 0, time.monotonic()
        while not self.over.wait(min(1.0, self.patience_s / LOOKS)):
            sign, now = self.probe.look(), time.monotonic()
            total, calls, failures = (
                self.board.add(*of) for of in (("progress", bool(sign)), ("calls", 0), ("failures", 0))
            )
            if total is None or calls is None:  # ranks that can't reach each other don't count as hung
                since = now
                continue
            if total != progress:
                if self.still:
                    reason = sign or "another rank makes progress"
                    self._print(f"rank {self.place.rank} continues after {now - since:.0f} s: {reason}")
                progress, since, self.still = total, now, False
            if now - since >= self.patience_s and not self.still:
                self.still = True
                if calls == self.called_for:  # this rank is the first to notice
                    calls = self.board.add("calls", 1) or 0
            if failures and not self.failures:  # the failed rank reports
                self.failures = failures
                self._write()
            if calls != self.called_for:
                self.called_for, self.still = calls, True
                self._write()
                self._report(f"no rank has moved for {self.patience_s:g} s", f"reported {progress}")

    def end(self, exit_code: int, error: str = "", traceback: str = "") -> None:
        """Record that the rank's program has ended; if it failed, the other ranks also write where they are.

        A single process that exits with a code but without an error did so on purpose, and no rank waits for it.
        """
        if os.getpid() != self.pid or self.ended:  # in a process forked by the program
            return
        if (exit_code == 0 and self.has_evidence) or (self.place.ranks == 1 and not error):
            self.ended = True
            return
        self._write(exit_code=exit_code, error=error, traceback=traceback)
        if exit_code:
            self.failed = True
            self.board.add("failures", 1)
        elif all(_ended_well(self.folder / f"rank{r}.end.json") for r in range(self.place.ranks)):
            with suppress(OSError):  # another rank may do the same
                evidence.clear(self.folder)
                self.folder.rmdir()

    def report(self, error: str) -> None:
        """Report a failure. Call it after `end`, and after the program's own error message."""
        if os.getpid() == self.pid and self.failed:
            self._report(f"rank {self.place.rank} {error}", "failed")

    def stop(self) -> None:
        """Stop the thread. Call it last: a thread inside the store while Python exits would abort the process."""
        if os.getpid() == self.pid:
            self.over.set()
            self.thread.join(STORE_S + GRACE_S)

    def _write(self, **end: Any) -> None:
        """Write all evidence of this rank; the final time includes its exit code."""
        with self.lock:
            if self.ended:
                return
            self.ended = "exit_code" in end
            self.has_evidence |= end.get("exit_code") != 0
            evidence.write_stacks(self.folder, self.place.rank)
            if hasattr(sys.modules.get("torch"), "distributed"):
                evidence.write_recorder(self.folder, self.place.rank)
            evidence.write_end(self.folder, self.place.rank, **end)

    def _report(self, what: str, occasion: str) -> None:
        """Print from the first rank of each machine, once its neighbours have had time to write."""
        machine = self.place.neighbours[0]
        if self.board.add(f"{occasion} on {machine}", 1) != 1:
            return
        deadline = time.monotonic() + GRACE_S
        files = [self.folder / f"rank{r}.end.json" for r in self.place.neighbours]
        while not all(f.exists() for f in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._print("\n".join([f"{what}; evidence is in {self.folder}", *self.diagnose(self.folder)]))

    def _print(self, text: str) -> None:
        print("\n".join(f"{self.prog}: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _ended_well(end: Path) -> bool:
    with suppress(OSError, ValueError):
        return json.loads(end.read_text())["exit_code"] == 0
    return False
