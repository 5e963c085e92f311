"""What the probes found on each rank, put together and ordered for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labs.doctor.probes import data, replicas
from labs.doctor.probes.findings import Finding

SEVERITY = "replicas effect shapes data accumulation validation checkpoint workers warning".split()
"""The probes, most severe first."""


def merge(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Finding]:
    """Put the findings of all ranks together, most severe first; compare what they say about data and replicas."""
    rows = [(rank, row) for rank, of in enumerate(per_rank) for row in of if not row["probe"].startswith("_")]
    across = replicas.compare(per_rank) + data.compare(per_rank)
    rows += [(rank, row) for row in across for rank in range(len(per_rank))]
    together: dict[tuple, list[tuple[int, dict[str, Any]]]] = {}
    for rank, row in rows:
        together.setdefault((row["probe"], row["file"], row["line"], row["fix"]), []).append((rank, row))
    merged = [Finding(**of[0][1] | {"ranks": sorted({rank for rank, _ in of})}) for of in together.values()]
    return sorted(merged, key=lambda f: (not f.wrong, SEVERITY.index(f.probe)))
