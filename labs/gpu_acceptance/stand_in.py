"""What only a GPU gives, made up for `--pretend`: so that every line of a step and of its judge runs without one.

All numbers here are invented. They replace what cores have measured, are marked as such in each record, and go into no
file of records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from labs.common.timing.benchmark_loop import RUNGS
from labs.gpu_acceptance.evidence import Evidence
from labs.kit.record import Record, Records

SOURCE = "invented by --pretend: no GPU was used"


def complete(step: str, evidence: Evidence) -> Evidence:
    """`evidence` of a step that ran on cores, with what a healthy GPU would have given."""
    if step in ADDED:
        name, make, replaced = ADDED[step]
        kept = [r for r in evidence.runs[name] if r.metric not in replaced]
        evidence.runs[name] = Records([*kept, *make(evidence)])
    evidence.facts |= FACTS.get(step, {})
    return evidence


def _record(metric: str, unit: str, value: float, **case: Any) -> Record:
    layout = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cpu"}
    return Record("pretend", metric, unit, (value,), "modelled", case, {}, layout, {"source": SOURCE})


def _probe(e: Evidence) -> Iterator[Record]:
    for dtype, share in (("fp32", 0.9), ("tf32", 0.8), ("bf16", 0.75), ("fp16", 0.75)):
        yield _record("matmul_share_of_peak", "", share, dtype=dtype, side=4096)
    yield _record("memory_b_s", "B/s", 0.9e12, op="copy")


def _copies(e: Evidence) -> Iterator[Record]:
    for direction in ("to device", "to host"):
        for memory, rate in (("pageable", 8e9), ("pinned", 24e9)):
            yield _record("host_device_b_s", "B/s", rate, direction=direction, memory=memory)


def _timing(e: Evidence) -> Iterator[Record]:
    yield _record("step_s", "s", 1e-3, mode="train")
    yield _record("step_flop", "FLOP", 1e9)
    yield _record("peak_flop_s", "FLOP/s", 1e13, kernel="product")
    for rung in RUNGS:
        yield _record("answer_s", "s", 2e-3, rung=rung)


def _utilisation(e: Evidence) -> Iterator[Record]:
    for job, share in (("large products", 0.99), ("waiting for data", 0.3)):
        yield _record("busy_share", "1", share, job=job)


def _amp(e: Evidence) -> Iterator[Record]:
    for precision, seconds in (("fp32", 8e-3), ("tf32", 4e-3), ("bf16", 1e-3), ("fp16", 1e-3)):
        yield _record("step_s", "s", seconds, part="matmul", side=4096, precision=precision, casts=False)


def _memory(e: Evidence) -> Iterator[Record]:
    for r in e.runs["memory"].where("measured_bytes"):
        yield _record("allocated_bytes", "B", 1.02 * r.value, **r.case)
        yield _record("reserved_bytes", "B", 1.2 * r.value, **r.case)


def _loader(e: Evidence) -> Iterator[Record]:
    for pin in (False, True):
        for non_blocking in (False, True):
            yield _record("images_per_s", "1/s", 1000 + 200 * pin, pin_memory=pin, non_blocking=non_blocking)


Made = tuple[str, Callable[[Evidence], Iterator[Record]], set[str]]
ADDED: dict[str, Made] = {
    "probe": ("probe", _probe, {"memory_b_s"}),
    "copies": ("copies", _copies, set()),
    "timing": ("timing", _timing, {"step_s", "step_flop", "peak_flop_s", "answer_s"}),
    "utilisation": ("utilisation", _utilisation, {"busy_share"}),
    "amp": ("amp", _amp, {"step_s", "not_possible"}),
    "memory": ("memory", _memory, set()),
    "loader": ("loader", _loader, set()),
}
"""For each step the run that gets records, their maker, and the metrics of the cores that they replace."""

FACTS: dict[str, dict[str, Any]] = {
    "probe": {"card": "no GPU", "bandwidth_b_s": 1e12},
    "copies": {"pcie_b_s": 31.5e9},
    "amp": {"formats": ["fp32", "tf32", "bf16", "fp16"]},
    "nvml": {"gpus": 2, "brief_queries": 20, "full_queries": 90, "brief_s": 0.01, "full_s": 0.1, "monitor_cost": 0.004},
}
