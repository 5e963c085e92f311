"""Refuse records that can't come from the GPU they name, such as those of a fake or of a build without CUDA."""

from __future__ import annotations

from labs.kit import hardware
from labs.kit.record import Record


def refusal(record: Record) -> str | None:
    """Return why this measurement can't come from the GPU that it names; None if nothing contradicts it."""
    made = record.provenance
    gpus = made.get("gpus") or []
    if not gpus:
        return "it names no GPU"
    if not made.get("cuda"):
        return f"torch {made.get('torch')} is a build without CUDA"
    if not made.get("driver"):
        return "it names no driver"
    known = hardware.spec(gpus[0])
    if known and record.unit == "FLOP/s":
        most = 1e12 * len(gpus) * max(known.tflops(name) or 0.0 for name in hardware.DTYPES)
        if record.value > most:
            return f"{record.metric} is {record.value:.2e} FLOP/s, above the datasheet's {most:.2e} (dense)"
    return None
