"""What notebook 04's records say of a step with GradScaler: its orders, its scale, and its interface."""

from __future__ import annotations

from typing import NamedTuple

from labs import loss_scaling
from labs.kit.claims import last, runs
from labs.kit.record import Record, Records

AS_FP32 = "as FP32"
TRACED = ("found_inf", "skipped", "scale", "predicted_scale")


class Tried(NamedTuple):
    """One order with one optimizer."""

    order: str
    optimizer: str
    outcome: str
    error: float
    """Parameters: how far they are off, relative to how far FP32 has moved them"""
    steps: int
    reference_steps: int
    moved: float
    """How far parameters have moved, over how far FP32 has moved them"""
    norm: float | None
    """Median of the norms that clipping saw"""

    @property
    def fine(self) -> bool:
        """Whether it trains as FP32 does."""
        return self.outcome == AS_FP32

    def __str__(self) -> str:
        """For example "loses steps (takes 8 of 19, sgd)"."""
        how = {"loses steps": f"takes {self.steps} of {self.reference_steps}, ", AS_FP32: "", "wrong": self._off()}
        return f"{self.outcome} ({how.get(self.outcome, '')}{self.optimizer})"

    def _off(self) -> str:
        percent = 100 * self.error
        return f"off by {f'{percent:.2g}' if percent < 10 else f'{percent:.0f}'} %, "


def tried(evidence: Records, *orders: str) -> dict[str, list[Tried]]:
    """{order: what came of it with each optimizer} of the last launch with all of them. LookupError without."""
    for run in reversed(runs(evidence, "loss_scaling", "parameter_error", order=orders[0])):
        found = _tried(run)
        if all(order in found for order in orders):
            return {order: found[order] for order in orders}
    raise LookupError(f"launch('loss_scaling') with the orders {', '.join(orders)} is needed")


def _tried(run: Records) -> dict[str, list[Tried]]:
    found: dict[str, list[Tried]] = {}
    for optimizer in dict.fromkeys(r.case["optimizer"] for r in run.where("parameter_error")):
        for row in loss_scaling.outcomes(run, optimizer):
            moved = run.one("update_ratio", order=row["order"], optimizer=optimizer)
            steps = (row["optimizer_steps"], moved.case["reference_steps"])
            one = Tried(
                row["order"], optimizer, row["outcome"], row["parameter_error"], *steps, moved.value, row["clip_norm"]
            )
            found.setdefault(one.order, []).append(one)
    return found


def harmless(found: dict[str, list[Tried]], *right: str) -> str:
    """ "holds" if all orders train as FP32, "does not hold" if one does not, although those of `right` do.

    "depends" if a right one fails too: then there is nothing to compare with.
    """
    if not all(t.fine for order in right for t in found[order]):
        return "depends"
    return "holds" if all(t.fine for ts in found.values() for t in ts) else "does not hold"


def said(ts: list[Tried]) -> str:
    """What came of one order, with each optimizer; once, if it trains as FP32 with all of them."""
    if all(t.fine for t in ts):
        return f"{AS_FP32} ({', '.join(t.optimizer for t in ts)})"
    return " and ".join(map(str, ts))


def trace(evidence: Records, name: str) -> dict[str, Record]:
    """{one of TRACED: step by step}. LookupError if nothing overflowed."""
    run = last(evidence, "loss_scaling", "found_inf", trace=name)
    found = {m: run.one(m, trace=name) for m in TRACED}
    if not any(found["found_inf"].samples):
        raise LookupError(f"launch('loss_scaling'): the trace {name!r} holds no overflow")
    return found
