"""Ratios of rates that did not take turns, as wide as both intervals allow."""

from __future__ import annotations

from labs.kit.measure import Estimate, differs, estimate, verdict
from labs.kit.record import Record


def quotient(a: Record, b: Record) -> Estimate:
    """a / b of two runs that did not take turns: as wide as the intervals of both allow.

    LookupError if one has a single sample, which has no interval.
    """
    for r in (a, b):
        if len(r.samples) < 2:
            raise LookupError(f"{r.case} of {r.metric!r} has one sample: at least two are needed")
    x, y = estimate(a.samples), estimate(b.samples)
    return Estimate(x.value / y.value, x.low / y.high, x.high / y.low, min(x.n, y.n), "x")


def counted(workers: int) -> str:
    """ "no workers", "1 worker", "4 workers"."""
    return f"{workers or 'no'} worker{'s' * (workers != 1)}"


def compared(a: Record, b: Record, what: str) -> str:
    """One clause on a / b: the ratio, no difference that can be shown, or that single samples cannot show any."""
    if min(len(a.samples), len(b.samples)) < 2:
        return f"{what}: {a.value / b.value:.3g} x, of single samples, which cannot show a difference"
    return verdict(quotient(a, b), what)


def may_be_equal(a: Record, b: Record) -> bool:
    """Whether the samples leave it open that a and b are the same; single samples always do."""
    return min(len(a.samples), len(b.samples)) < 2 or not differs(quotient(a, b))
