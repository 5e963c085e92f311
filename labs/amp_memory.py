"""How much memory does autocast save, and above which batch size?

    python -m labs.amp_memory      |      python -m labs.amp_memory --batches 1 12 24 --tokens 128

About 10 s on 2 CPU cores; needs no GPU. labs.common.oracle traces the second training step of BERT-large with AdamW by
CUDA's rules, on tensors without storage. The peak is the largest number of bytes alive at once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from labs.common import oracle
from labs.common.models.large_models import bert, tiny_bert
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """Which steps to trace."""

    formats: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16")
    """FP32, or a 16-bit format under autocast."""
    batches: tuple[int, ...] = (1, 4, 12, 16)
    """Sequences per step."""
    tokens: Annotated[int, Interval(ge=8, le=512)] = 512
    """Tokens per sequence."""
    smoke: bool = False
    """Trace a small BERT instead."""

    def __post_init__(self) -> None:
        require(min(self.batches, default=0) >= 1, f"batches must hold positive numbers, not {self.batches}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield each step's peak bytes by category; the ranks share the steps."""
    source = tiny_bert if config.smoke else functools.partial(bert, seq=config.tokens)
    cases = [(name, n) for n in config.batches for name in config.formats]
    peaks = {}
    for name, n in cases[rank.rank :: rank.world_size]:
        trace = oracle.step(source, n, optimizer="adam", precision=name, target="cuda")
        peaks[name, n] = trace.peak, trace.peak_event.phase
        rank.progress(len(peaks), len(cases) // rank.world_size, f"{name}, {n} sequences")
    for (name, n), (peak, phase) in sorted(item for part in rank.gather(peaks) for item in part.items()):
        for category_, size in peak.items():
            case = {"format": name, "batch": n, "tokens": config.tokens, "category": category_, "phase": phase}
            yield rank.record("peak_bytes", "B", size, kind="modelled", **case)


def peaks(records: Records) -> dict[tuple[str, int], float]:
    """Return peak bytes by (format, batch)."""
    found: dict[tuple[str, int], float] = {}
    for r in records.where("peak_bytes"):
        key = r.case["format"], r.case["batch"]
        found[key] = found.get(key, 0.0) + r.value
    return found


def answer(records: Records) -> Iterator[str]:
    """Yield what autocast saves at each batch size."""
    found = peaks(records)
    for (name, n), size in sorted(found.items(), key=lambda item: item[0][1]):
        if name != "fp32" and ("fp32", n) in found:
            full = found["fp32", n]
            said = f"{full / 1e9:.1f} GB in FP32, {size / 1e9:.1f} in {name.upper()}, {1 - size / full:.0%} less"
            yield f"{n} sequences: {said}."


if __name__ == "__main__":
    cli.main()
