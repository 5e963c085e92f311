"""The same measurement on the room's machines: the same lab, metric, unit and case from the same configuration."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass

from labs.classroom.room.collect import Learner
from labs.classroom.room.questions import machine_of
from labs.kit.record import Record

MAX_ROWS = 40  # of one lab's table


@dataclass(frozen=True)
class Row:
    """One measurement that at least two learners have: how far their machines are apart."""

    metric: str
    case: str
    unit: str
    learners: int
    low: float
    median: float
    high: float

    @property
    def ratio(self) -> float:
        """Highest over lowest; 1 where all are equal, infinite where only some are 0 or signs differ."""
        if self.low == self.high:
            return 1.0
        return self.high / self.low if self.low > 0 else float("inf")


def tables(learners: list[Learner]) -> dict[str, tuple[list[Row], int]]:
    """{lab: (rows, how many more there are)}: the same measurement by at least two learners, farthest apart first."""
    values: dict[tuple[str, ...], dict[str, Record]] = defaultdict(dict)
    for learner in learners:
        for r in (r for run in learner.runs for r in run if r.kind == "recorded"):
            values[
                r.lab,
                r.metric,
                r.unit,
                json.dumps(r.case, sort_keys=True),
                json.dumps(r.config, sort_keys=True),
                str(r.layout.get("rank")),
            ][learner.name] = r
    labs: dict[str, list[Row]] = defaultdict(list)
    for found in values.values():
        if len(found) > 1:
            labs[next(iter(found.values())).lab].append(_row(list(found.values())))
    return {
        lab: (sorted(rows, key=lambda r: -r.ratio)[:MAX_ROWS], max(0, len(rows) - MAX_ROWS))
        for lab, rows in sorted(labs.items())
    }


def _row(found: list[Record]) -> Row:
    first, numbers = found[0], [r.value for r in found]
    case = ", ".join(f"{k} {v}" for k, v in first.case.items())
    return Row(
        first.metric,
        case if len(case) < 100 else case[:97] + "...",
        first.unit,
        len(numbers),
        min(numbers),
        statistics.median(numbers),
        max(numbers),
    )


def kinds_of_machines(learners: list[Learner]) -> Counter[str]:
    """{machine: learners} by each learner's latest file or preflight."""
    return Counter(m for learner in learners if (m := _latest_machine(learner)))


def _latest_machine(learner: Learner) -> str:
    if learner.preflight and isinstance(learner.preflight.get("machine"), dict) and learner.preflight["machine"]:
        return machine_of(learner.preflight["machine"])
    found = [run.provenance for run in learner.runs[-1:]] + [r["machine"] for r in learner.predictions[-1:]]
    return machine_of(found[0]) if found else ""
