"""What the probes found on each rank, put together and ordered for the report."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SEVERITY = "replicas effect shapes data accumulation validation checkpoint workers warning".split()
"""The probes, most severe first."""


@dataclass(frozen=True)
class Finding:
    """A thing that makes training wrong, or (`wrong` is False) that deserves a look."""

    probe: str
    title: str
    """One sentence with its main numbers, without a full stop."""
    numbers: dict[str, Any]
    file: str
    line: int
    code: str
    fix: str
    also: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    wrong: bool = True

    @property
    def where(self) -> str:
        """Return "train.py:51  code"; "" without a line."""
        return f"{os.path.basename(self.file)}:{self.line}  {self.code}" if self.file else ""


def found(
    probe: str,
    title: str,
    place: tuple[str, int],
    fix: str,
    numbers: dict[str, Any] | None = None,
    also: Sequence[str] = (),
    wrong: bool = True,
) -> dict[str, Any]:
    """Return a finding of one rank as JSON holds it."""
    file, line = place
    code = linecache.getline(file, line).strip() if file else ""
    return {
        "probe": probe,
        "title": title,
        "numbers": numbers or {},
        "file": file,
        "line": line,
        "source line": code,
        "fix": fix,
        "also": list(also),
        "wrong": wrong,
    }


def merge(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Finding]:
    """Put the findings of all ranks together, most severe first; compare what they say about data and replicas."""
    from labs.doctor.probes import data, replicas  # they import `found` from here

    rows = [(rank, row) for rank, of in enumerate(per_rank) for row in of]
    across = replicas.compare(per_rank) + data.compare(per_rank)
    rows += [(rank, row) for row in across for rank in range(len(per_rank))]
    together: dict[tuple, list[tuple[int, dict[str, Any]]]] = {}
    for rank, row in rows:
        if not row["probe"].startswith("_"):
            together.setdefault((row["probe"], row["file"], row["line"], row["fix"]), []).append((rank, row))
    merged = [_one(of) for of in together.values()]
    return sorted(merged, key=lambda f: (not f.wrong, SEVERITY.index(f.probe)))


def _one(of: Sequence[tuple[int, dict[str, Any]]]) -> Finding:
    row = of[0][1]
    return Finding(
        row["probe"],
        row["title"],
        row["numbers"],
        row["file"],
        row["line"],
        row["source line"],
        row["fix"],
        row["also"],
        sorted({rank for rank, _ in of}),
        row["wrong"],
    )
