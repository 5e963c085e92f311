"""What the records of `mixed_precision` say of each format: speed and memory."""

from __future__ import annotations

from labs.kit import measure
from labs.kit.measure import Estimate
from labs.kit.record import Records


def short(name: str) -> str:
    """A model's name without the module of its factory."""
    return name.rpartition(":")[2]


def speed_ups(records: Records) -> dict[tuple[str, str], Estimate]:
    """Time of FP32's step over that of each other format's, pair by pair, by (model, format)."""
    found = {}
    for r in (r for r in records.where("step_s") if "model" in r.case and r.case["precision"] != "fp32"):
        base = records.where("step_s", model=r.case["model"], precision="fp32")
        if len(base):
            found[r.case["model"], r.case["precision"]] = measure.paired_ratio(base[0].samples, r.samples)
    return found


def saved_shares(records: Records) -> dict[tuple[str, str], float]:
    """Part of FP32's saved bytes that a format does not keep, by (model, format); negative if it keeps more."""
    found = {}
    for r in records.where("saved_bytes"):
        base = records.one("saved_bytes", model=r.case["model"], precision="fp32")
        found[r.case["model"], r.case["precision"]] = 1 - r.value / base.value
    return found
