"""What notebook 05's records say of remedies against a full memory."""

from __future__ import annotations

from typing import NamedTuple

from labs.kit.claims import last, ratio, size, word
from labs.kit.measure import Estimate
from labs.kit.record import Records
from labs.memory_remedies.ways_out import HALF, LEAN

LAB = "memory_remedies"
MICRO, AUTOCAST = "4 micro-batches", "bf16 autocast"
HELPS = 10.0  # %: a peak that falls by less is no remedy for a step that does not fit


class Full(NamedTuple):
    """A model that fills the memory, and by how many % each remedy lowers the peak of its step."""

    model: str
    full_of: str
    peak: float
    falls: dict[str, float]

    def said(self, *remedies: str) -> str:
        """What these take off the peak, and which takes off most."""
        name, fall = max(self.falls.items(), key=lambda item: item[1])
        falls = [f"{remedy} {self.falls[remedy]:.0f} %" for remedy in remedies]
        falls += [f"most of all {name} {fall:.0f} %"] * (name not in remedies)
        return f"{self.model}, full of {self.full_of}: {', '.join(falls)}"


def advice(evidence: Records, *remedies: str) -> tuple[str, str]:
    """(word, reason) for remedies that are to help whatever fills the memory."""
    found = filled(evidence, *remedies)
    right = [m.falls[remedy] >= HELPS for m in found for remedy in remedies]
    said = "; ".join(m.said(*remedies) for m in found)
    return word(right, [not r for r in right]), f"off the peak of {said}"


def halved(evidence: Records) -> str:
    """What half the batch takes off the peak of the model that is full of activations."""
    m = next(m for m in filled(evidence, HALF) if m.full_of == "activations")
    return f"half the batch takes {m.falls[HALF]:.0f} % off the {size(m.peak)} of a real step of {m.model}"


def filled(evidence: Records, *remedies: str) -> list[Full]:
    """Models of the last launch with these remedies. LookupError without one full of activations and one of states."""
    run = last(evidence, LAB, "peak_bytes", part="remedies", remedy=remedies[-1])
    found = [_full(run, r.case["model"], r.case["full_of"]) for r in run.where("peak_bytes", remedy="none")]
    missing = [k for k in ("activations", "states") if k not in {m.full_of for m in found}]
    if missing or any(remedy not in m.falls for m in found for remedy in remedies):
        raise LookupError(
            f"launch({LAB!r}) with {' and '.join(remedies)} on a model full of activations and on one "
            "full of states is needed"
        )
    return found


def _full(run: Records, model: str, full_of: str) -> Full:
    def value(metric: str, remedy: str) -> float:
        return run.one(metric, part="remedies", model=model, remedy=remedy).value

    whole, falls = value("peak_bytes", "none"), {}
    for r in run.where("predicted_bytes", part="remedies", model=model):
        remedy = r.case["remedy"]
        if remedy == LEAN:  # there is none in torch: calculated
            falls[remedy] = 100 * (1 - r.value / value("predicted_bytes", "none"))
        elif remedy != "none":
            falls[remedy] = 100 * (1 - value("peak_bytes", remedy) / whole)
    return Full(model, full_of, whole, falls)


def accumulated(evidence: Records) -> tuple[float, Estimate]:
    """(largest relative error of a gradient from micro-batches, time of a step with MICRO over that of the whole)."""
    run = last(evidence, LAB, "gradient_error", part="accumulation")
    errors = [r.value for r in run.where("gradient_error", part="accumulation")]
    many, whole = (run.one("step_s", part="accumulation", micro_batches=m) for m in (4, 1))
    return max(errors), ratio(many, whole)
