"""A thread beside a rank: it notices that all ranks of the job stand still, and has each write what it was doing.

Ranks know of each other through the store by which they meet: torchrun's, or that of rank 0. Imports no torch.
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
from labs.watch.movement import Movement

LOOKS = 20  # within the patience, at least; once per second or more often
STORE_S = 5.0
"""For an answer of the store that the ranks share."""
GRACE_S = 2.0
"""Given to the other ranks to write, before this one goes or tells."""


class Board:
    """Numbers that all ranks add to. `add` returns None as long as ranks cannot know of each other."""

    def __init__(self, place: Place) -> None:
        self.place, self.store = place, None
        self.own: dict[str, int] = {}

    def add(self, name: str, by: int) -> int | None:
        """The number's new value."""
        if self.place.ranks == 1:
            self.own[name] = self.own.get(name, 0) + by
            return self.own[name]
        try:
            self.store = self.store or self._connect()
            # A store of torchrun lives through restarts, so that each start has numbers of its own
            return self.store and self.store.add(f"labs.watch/{self.place.restart}/{name}", by)
        except (RuntimeError, KeyError):  # it has gone, or takes too long; or srun has told of ranks, nobody of a store
            self.store = None
            return None

    def _connect(self) -> Any:
        """A connection of this thread's own: the program's is taken while the program waits for something."""
        distributed = sys.modules.get("torch.distributed")
        if not hasattr(distributed, "TCPStore") or not hasattr(distributed, "is_initialized"):
            return None  # the program has not loaded it yet
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not (by_agent or distributed.is_initialized()):
            return None  # rank 0 has not opened it yet
        return distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S),
        )


class Watchman:
    """Watches a rank from `start()` on. `diagnose(folder)` yields the lines to print about a folder of evidence."""

    def __init__(self, folder: Path, patience_s: float, diagnose: Callable[[Path], Iterable[str]], prog: str) -> None:
        self.place = Place.of(os.environ, one_machine=True)
        self.folder = folder / f"restart{self.place.restart}" if self.place.restart else folder
        self.patience_s, self.diagnose, self.prog = patience_s, diagnose, prog
        self.board, self.movement = Board(self.place), Movement()
        self.pid, self.lock, self.over = os.getpid(), threading.Lock(), threading.Event()
        self.called_for, self.failures = 0, 0  # by any rank, that this one has answered
        self.still = self.kept = self.ended = self.failed = False

    def start(self) -> None:
        """Before the program loads torch: the recorder's size is read once. Earlier torch than 2.13 may keep none."""
        if evidence.OLDER_BUFFER not in os.environ:  # which torch reads only where the newer name is not set
            os.environ.setdefault(evidence.BUFFER, "2000")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # should NCCL's own watchdog be the first
        for old in self.folder.glob(f"rank{self.place.rank}.*"):
            old.unlink()
        self.thread = threading.Thread(target=self._watch, name="labs.watch", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        news, since = 0, time.monotonic()
        while not self.over.wait(min(1.0, self.patience_s / LOOKS)):
            moved, now = self.movement.look(), time.monotonic()
            found, calls, failures = (
                self.board.add(*of) for of in (("moves", bool(moved)), ("calls", 0), ("failures", 0))
            )
            if found is None or calls is None:  # ranks that know nothing of each other are not still
                since = now
                continue
            if found != news:
                if self.still:
                    self._say(
                        f"rank {self.place.rank} goes on after {now - since:.0f} s: {moved or 'another rank moves'}"
                    )
                news, since, self.still = found, now, False
            if now - since >= self.patience_s and not self.still:
                self.still = True
                if calls == self.called_for:  # it is the first to notice
                    calls = self.board.add("calls", 1) or 0
            if failures and not self.failures:  # who has failed tells
                self.failures = failures
                self._write()
            if calls != self.called_for:
                self.called_for, self.still = calls, True
                self._write()
                self._tell(f"no rank has moved for {self.patience_s:g} s", f"told {news}")

    def end(self, exit_code: int, error: str = "", traceback: str = "") -> None:
        """To be called when the rank's program has ended; if not well, the others write where they are, too.

        That a single process leaves with an exit code and without an error is what it wanted, and nobody waits for it.
        """
        if os.getpid() != self.pid or self.ended:  # in a process that the program has forked
            return
        if (exit_code == 0 and self.kept) or (self.place.ranks == 1 and not error):
            self.ended = True
            return
        self._write(exit_code=exit_code, error=error, traceback=traceback)
        if exit_code:
            self.failed = True
            self.board.add("failures", 1)
        elif all(_ended_well(self.folder / f"rank{r}.end.json") for r in self.place.neighbours):
            with suppress(OSError):  # another rank may do the same
                evidence.clear(self.folder)
                self.folder.rmdir()

    def tell(self, error: str) -> None:
        """After `end`, and after the program's own words."""
        if os.getpid() == self.pid and self.failed:
            self._tell(f"rank {self.place.rank} {error}", "failed")

    def stop(self) -> None:
        """When nothing follows: a thread that Python's end meets in a call of the store would abort the process."""
        if os.getpid() == self.pid:
            self.over.set()
            self.thread.join(STORE_S + GRACE_S)

    def _write(self, **end: Any) -> None:
        """All that there is of this rank; the last time with its exit code."""
        with self.lock:
            if self.ended:
                return
            self.ended, self.kept = "exit_code" in end, self.kept or end.get("exit_code") != 0
            evidence.write_stacks(self.folder, self.place.rank)
            if hasattr(sys.modules.get("torch"), "distributed"):
                evidence.write_recorder(self.folder, self.place.rank)
            evidence.write_end(self.folder, self.place.rank, **end)

    def _tell(self, what: str, occasion: str) -> None:
        """By the first rank of each machine, when its neighbours had time to write."""
        machine = self.place.neighbours[0]
        if self.board.add(f"{occasion} on {machine}", 1) != 1:
            return
        deadline = time.monotonic() + GRACE_S
        files = [self.folder / f"rank{r}.end.json" for r in self.place.neighbours]
        while not all(f.exists() for f in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._say("\n".join([f"{what}; evidence is in {self.folder}", *self.diagnose(self.folder)]))

    def _say(self, text: str) -> None:
        print("\n".join(f"{self.prog}: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _ended_well(end: Path) -> bool:
    with suppress(OSError, ValueError):
        return json.loads(end.read_text())["exit_code"] == 0
    return False
