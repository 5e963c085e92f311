"""Finding the records that a verdict needs among those of many launches, and comparing two of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Record, Records

GB, MB = 1e9, 1e6  # as memory is sold
GAIN = 1.05  # up to which a gain is none


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


def ends(said: Sequence[str]) -> str:
    """The first and the last of sorted parts; one, if there is only one."""
    return " to ".join(dict.fromkeys((said[0], said[-1])))


def size(nbytes: float) -> str:
    """ "10.3 GB", or MB below one."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / MB:.1f} MB"


def within(ratio: Estimate, margin: float = 0.05, null: float = 1.0) -> bool:
    """Whether the interval shows that it is at most `margin` away from `null`: more than "no difference shown"."""
    return null - margin <= ratio.low and ratio.high <= null + margin


def model_of(run: Records) -> str:
    """The model of a launch, without the module of a factory."""
    return str(run[0].config.get("model", "?")).rpartition(":")[2]


def word(right: Sequence[bool], wrong: Sequence[bool]) -> str:
    """ "holds" if every comparison is shown to be right, "does not hold" if every one is shown to be wrong.

    Otherwise "depends": on the case, or on samples that cannot show either. LookupError without a comparison.
    """
    if not right:
        raise LookupError("nothing to compare was run")
    return "holds" if all(right) else "does not hold" if all(wrong) else "depends"


def pairs(a: Record, b: Record) -> Estimate:
    """a / b of two that took turns. LookupError if they are no pairs, or only one."""
    if len(a.samples) < 2:
        raise LookupError(f"{a.case} of {a.metric!r} has one round: at least two are needed")
    return ratio(a, b)
