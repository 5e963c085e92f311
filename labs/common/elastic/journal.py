"""Record what each rank did and when, as JSON lines that survive a SIGKILL, and time a restart's phases.

Doesn't import torch, because the journal starts before that import.
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
    ("detect", "detected"),  # the agent polls every 0.1 s
    ("stop and rendezvous", "starting"),  # surviving ranks are stopped, all agents rendezvous again
    ("start processes", "started"),
    ("import", "imported"),
    ("process group", "group"),
    ("data and model", "built"),
    ("load checkpoint", "loaded"),
    ("first step", "step"),
)
"""Phases of a restart, in order, and the event that ends each (on the last rank, if ranks record it)."""


class Journal:
    """Appends events to this process's file: one file per rank and start."""

    def __init__(self, folder: Path, rank: int, started: float) -> None:
        self.rank, self.restart = rank, int(os.environ.get(RESTART_COUNT, "0"))
        place = folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self.file = (place / f"rank-{rank}-{os.getpid()}.jsonl").open("a", buffering=1)
        self("started", at=started)

    def __call__(self, event: str, *, at: float | None = None, **values: Any) -> None:
        """Record `event` with `values` and the wall-clock time, which is comparable across hosts."""
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
    """Return all events of a run, including its agent's, in order of time."""
    rows = [json.loads(line) for path in (folder / FOLDER).glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["time"])


@dataclass(frozen=True)
class History:
    """The history of a run, from its journal."""

    events: Sequence[dict[str, Any]]

    def of(self, event: str, **values: Any) -> list[dict[str, Any]]:
        """Return all events with this name and these values."""
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in values.items())]

    @property
    def restarts(self) -> int:
        """How many times the ranks were restarted."""
        return max((e["restart"] for e in self.of("started")), default=0)

    @property
    def pids(self) -> set[int]:
        """Process ids of all ranks, over all starts."""
        return {e["pid"] for e in self.of("started")}

    def losses(self, rank: int = 0) -> list[float]:
        """Return each step's loss, in order; a repeated step's last one."""
        found = {e["step"]: e["loss"] for e in self.of("step", rank=rank)}
        return [found[step] for step in sorted(found)]

    def steps_redone(self) -> int:
        """Return how many steps were repeated: the work that was lost."""
        done = [e["step"] for e in self.of("step", rank=0)]
        return len(done) - len(set(done))

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of the first restart; together, from the kill to the end of the first step.

        A phase without a recorded end is left out, and the next one includes its time. A phase that seems to end before
        the one before it, because the clock was set back, takes 0 s. Empty without a kill.
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
        """Return when all ranks (or the agent) had recorded `event` in the first restart; None if they haven't."""
        if math.isinf(since):
            return None
        if event in ("detected", "starting"):
            return min((e["time"] for e in self.of(event) if e["time"] >= since), default=None)
        firsts: dict[int, float] = {}
        for e in self.of(event, restart=1):
            firsts.setdefault(e["rank"], e["time"])
        return max(firsts.values(), default=None)

    def redo_s(self) -> float:
        """Return the seconds of repeated steps, except the first, which is the restart's last phase."""
        done = {e["step"] for e in self.of("step", rank=0, restart=0)}
        again = [e["seconds"] for e in self.of("step", rank=0, restart=1) if e["step"] in done]
        return sum(again[1:])
