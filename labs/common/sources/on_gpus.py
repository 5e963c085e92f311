"""Recorded GPU runs of this course's labs, to show beside a learner's own results."""

from __future__ import annotations

from pathlib import Path

from labs.kit.record import Records, load

RECORDS = Path(__file__).parents[3] / "records"


def runs(lab: str, folder: Path = RECORDS) -> list[Records]:
    """Return the recorded run of labs.<lab> on each machine with GPUs, in order of the machines' folders."""
    found = (load(path) for path in sorted(folder.glob(f"*/{lab}.jsonl")))
    return [run for run in found if run[0].layout.get("device") == "cuda"]
