"""What each rank did and when, as JSON lines that survive a SIGKILL; and what a restart consists of.

Without torch: it begins before that is imported.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit.restart import RESTART_COUNT

FOLDER = "journal"
PHASES = (
    ("detect", "detected"),  # the agent looks every 0.1 s
    ("stop and rendezvous", "starting"),  # the ranks that are left are ended, all agents meet again
    ("start processes", "started"),
    ("import", "imported"),
    ("process group", "group"),
    ("data and model", "built"),
    ("load checkpoint", "loaded"),
    ("first step", "step"),
)
"""Phases of a restart in their order, each with the event that ends it: on the last rank, where ranks tell."""


class Journal:
    """Appends to a file of this process: one per rank and start."""

    def __init__(self, folder: Path, rank: int, started: float) -> None:
        self.rank, self.restart = rank, int(os.environ.get(RESTART_COUNT, "0"))
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self.file = (place / f"rank-{rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        self("started", at=started)

    def __call__(self, event: str, *, at: float | None = None, **values: Any) -> None:
        """Note `event` with the time (of the wall clock, which hosts share), and values."""
        row = {
            "event": event,
            "time": time.time() if at is None else at,
            "rank": self.rank,
            "restart": self.restart,
            "pid": os.getpid(),
            **values,
        }
        self.file.write(json.dumps(row) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """All events of a run in the order of their times, those of its agent included."""
    rows = [json.loads(line) for path in (folder / FOLDER).glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["time"])


@dataclass(frozen=True)
class History:
    """A run as its journal tells it."""

    events: Sequence[dict[str, Any]]

    def of(self, event: str, **values: Any) -> list[dict[str, Any]]:
        """All events of that name with these values."""
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in values.items())]

    @property
    def restarts(self) -> int:
        """How often the ranks were started again."""
        return max((e["restart"] for e in self.of("started")), default=0)

    @property
    def pids(self) -> set[int]:
        """All processes that were a rank."""
        return {e["pid"] for e in self.of("started")}

    def losses(self, rank: int = 0) -> list[float]:
        """Loss of each step in order, of a step that was done twice the last one."""
        found = {e["step"]: e["loss"] for e in self.of("step", rank=rank)}
        return [found[step] for step in sorted(found)]

    def steps_redone(self) -> int:
        """Steps that were done more than once: the work that was lost."""
        done = [e["step"] for e in self.of("step", rank=0)]
        return len(done) - len(set(done))

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the first restart; together they last from the kill to the end of a first step.

        A phase whose end nobody noted is left out, and its time is in the next one; so is what a clock that was set
        meanwhile put before the kill. None are known without a kill.
        """
        found: dict[str, float] = {}
        before = next((e["time"] for e in self.of("killed")), math.inf)
        for phase, event in PHASES:
            after = self._last(event, before)
            if after is not None:
                found[phase] = max(after - before, 0.0)
                before = max(after, before)
        return found

    def _last(self, event: str, since: float) -> float | None:
        """When all ranks had come to `event` in the first restart, if noted; the agent's own events come once."""
        if math.isinf(since):
            return None
        if event in ("detected", "starting"):
            return min((e["time"] for e in self.of(event) if e["time"] >= since), default=None)
        firsts: dict[int, float] = {}
        for e in self.of(event, restart=1):
            firsts.setdefault(e["rank"], e["time"])
        return max(firsts.values(), default=None)

    def redo_s(self) -> float:
        """Seconds that steps took which had been done before, without the first: that is the restart's last phase."""
        done = {e["step"] for e in self.of("step", rank=0, restart=0)}
        again = [e["seconds"] for e in self.of("step", rank=0, restart=1) if e["step"] in done]
        return sum(again[1:])
