"""The provenance line under a figure: where, on what and when its numbers were taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def provenance_line(records: Iterable[Any]) -> str:
    """One phrase per distinct origin of `records`, joined by "; ", for example

    "measured here on Xeon 8481C, 2 of 8 cores, torch 2.13.0, 2026-11-21 UTC". A published or modelled number
    may name its source in the record's provenance, under "source".
    """
    ranks: dict[tuple[str, ...], int] = {}
    for r in records:
        key = origin(r.kind, r.provenance)
        ranks[key] = max(ranks.get(key, 1), int(r.layout.get("world_size") or 1))
    return "; ".join(_phrase(key, n) for key, n in ranks.items())


def origin(kind: str, p: dict[str, Any]) -> tuple[str, ...]:
    """Kind and facts; records that share them share one phrase. Times of day do not count, dates do."""
    if kind == "modelled" or p.get("source"):
        return kind, str(p.get("source") or "")
    gpus = [g.get("name") if isinstance(g, dict) else g for g in p.get("gpus") or []]
    names = " + ".join(f"{gpus.count(g)} x {g}" if gpus.count(g) > 1 else str(g) for g in dict.fromkeys(gpus))
    torch = f"torch {p['torch']}" if p.get("torch") else ""
    day = f"{str(p['utc'])[:10]} UTC" if p.get("utc") else ""
    return (
        kind,
        names or str(p.get("cpu") or "unknown processor"),
        "" if names else str(p.get("cores") or ""),
        torch,
        day,
    )


def _phrase(key: tuple[str, ...], ranks: int) -> str:
    kind, *facts = key
    if len(facts) == 1:
        return f"{kind}: {facts[0]}" if facts[0] else "modelled by this course"
    name, cores, *rest = facts
    used = f"{ranks} of {cores} cores" if cores else ""
    if cores and ranks > int(cores):
        used = f"{ranks} ranks sharing {cores} core{'' if cores == '1' else 's'}"
    place = "measured here on" if kind == "measured" else f"{kind} on"
    return f"{place} {', '.join(f for f in (name, used, *rest) if f)}"
