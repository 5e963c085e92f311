"""Who can start: the preflight's verdicts, and what differs from most of the room."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from labs.classroom.room.collect import Learner, shown
from labs.classroom.room.questions import machine_of

VERSIONS = ("python", "torch", "cuda", "jupyterlab", "ipykernel")


@dataclass(frozen=True)
class Ready:
    """One learner's row. `differs` names what most of the room has otherwise."""

    name: str
    verdict: str
    reasons: tuple[str, ...]
    warnings: int
    machine: str
    differs: tuple[str, ...]
    utc: str


def readiness(learners: list[Learner]) -> list[Ready]:
    """One row per learner, those who need help first."""
    common = {name: _majority([_facts(x.preflight)[name] for x in learners if x.preflight]) for name in _facts({})}
    rows = [_ready(learner, common) for learner in learners]
    order = {"NO-GO": 0, "not run": 1, "GO": 2}
    return sorted(rows, key=lambda r: (order[r.verdict], not r.differs, r.name))


def _facts(preflight: dict[str, Any]) -> dict[str, str]:
    """What should be equal in a room: the course's version and the versions it runs on."""
    versions = preflight.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {"course": shown(preflight.get("course")), **{v: shown(versions.get(v)) for v in VERSIONS}}


def _majority(values: list[str]) -> str:
    """What more than half of those who know have; "" if nothing is so common."""
    known = Counter(v for v in values if v)
    value, count = known.most_common(1)[0] if known else ("", 0)
    return value if count > 1 and 2 * count > sum(known.values()) else ""


def _ready(learner: Learner, common: dict[str, str]) -> Ready:
    report = learner.preflight
    if report is None:
        return Ready(learner.name, "not run", (), 0, "", (), "")
    reasons = report.get("reasons") if isinstance(report.get("reasons"), list) else []
    facts = _facts(report)
    differs = tuple(
        f"{name} {facts[name] or 'unknown'}, most have {value}"
        for name, value in common.items()
        if value and facts[name] != value
    )
    machine = report.get("machine")
    warnings = report.get("warnings")
    return Ready(
        learner.name,
        report["verdict"],
        tuple(shown(r, 300) for r in reasons),
        warnings if isinstance(warnings, int) else 0,
        machine_of(machine) if isinstance(machine, dict) and machine else "",
        differs,
        shown(report.get("utc"))[:16].replace("T", " "),
    )
