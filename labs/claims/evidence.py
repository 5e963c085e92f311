"""Finding the records that a verdict needs among those of many launches, and comparing two of them."""

from __future__ import annotations

import json

from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Record, Records


def runs(evidence: Records, lab: str, metric: str, **case: object) -> list[Records]:
    """The launches of `lab` that hold such a record, in order. LookupError if there is none."""
    found: dict[str, list[Record]] = {}
    for r in evidence:
        if r.lab == lab:
            key = json.dumps([r.config, r.layout.get("world_size"), r.provenance], sort_keys=True, default=str)
            found.setdefault(key, []).append(r)
    fit = [run for run in map(Records, found.values()) if len(run.where(metric, **case))]
    if not fit:
        raise LookupError(f"no launch({lab!r}) with {metric!r}{f' and {case}' if case else ''} here")
    return fit


def last(evidence: Records, lab: str, metric: str, **case: object) -> Records:
    """The last launch of `lab` that holds such a record. LookupError if there is none."""
    return runs(evidence, lab, metric, **case)[-1]


def ratio(a: Record, b: Record) -> Estimate:
    """a / b pair by pair. LookupError if their samples are no pairs."""
    if len(a.samples) != len(b.samples):
        raise LookupError(f"{a.case} and {b.case} of {a.metric!r} have {len(a.samples)} and {len(b.samples)} samples")
    return paired_ratio(a.samples, b.samples)


def gain(a: Record, b: Record) -> Estimate:
    """a - b pair by pair (by seed), for shares: in percentage points. LookupError if their samples are no pairs."""
    if len(a.samples) != len(b.samples):
        raise LookupError(f"{a.case} and {b.case} of {a.metric!r} have {len(a.samples)} and {len(b.samples)} samples")
    return estimate([100 * (x - y) for x, y in zip(a.samples, b.samples, strict=True)], "points")


def percent(shares: Record) -> Estimate:
    """A record of shares in percent."""
    return estimate(shares.samples).scaled(100, "%")
