"""Modelled results that take a whole run: kept in records/modelled, for smoke runs, which leave out what they need.

    python -m labs.figures.modelled        # run the labs at full length again and keep what they model

What is modelled, such as a traced step of BERT-large, is the same on every machine, so tables drawn from a smoke run
(COURSE_SMOKE=1) show the same facts as those of a whole run. A test compares the files with whole runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labs.kit.launch import launch
from labs.kit.record import Record, Records, load

KEPT = Path(__file__).parents[2] / "records" / "modelled"
LABS: dict[str, dict[str, Any]] = {"memory_oracle": {}, "memory_remedies": {"parts": ("lengths",)}}
SHOWN = ("timeline_op", "timeline_bytes", "peak_op", "peak_bytes", "states_bytes", "cluster_bytes", "largest_batch",
         "largest_batch_bytes", "next_batch_bytes")  # fmt: skip


def whole(run: Records, lab: str) -> Records:
    """`run` of `lab`, or what was kept of a whole one if that is a smoke run."""
    return load(KEPT / f"{lab}.jsonl") if run[0].config["smoke"] else run


def needed(run: Records, lab: str) -> Records:
    """The records of a whole run of `lab` that figures draw."""
    return Records(r for r in run if r.kind == "modelled" and (_oracle(r) if lab == "memory_oracle" else _lengths(r)))


def _oracle(r: Record) -> bool:
    return r.metric in SHOWN and (r.case.get("part") != "small")


def _lengths(r: Record) -> bool:
    unlimited = r.case["headroom"] == "unlimited" and r.metric in (
        "lasting_allocs", "allocated_peak_bytes", "reserved_peak_bytes",
    )  # fmt: skip
    return r.metric == "fits" or unlimited


def main() -> None:
    """Run each lab and write its file."""
    for lab, parameters in LABS.items():
        print(needed(launch(lab, nproc=1, **parameters), lab).save(KEPT / f"{lab}.jsonl"))


if __name__ == "__main__":
    main()
