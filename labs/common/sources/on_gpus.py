"""Recorded GPU runs of this course's labs, to show beside a learner's own results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from labs.kit.display import say
from labs.kit.record import Records, load, provenance_line

RECORDS = Path(__file__).parents[3] / "records"
NONE = "No recorded GPU run of this lab exists yet, so no number is shown in its place."


def runs(lab: str, folder: Path = RECORDS) -> list[Records]:
    """Return the recorded run of labs.<lab> on each machine with GPUs, in order of the machines' folders."""
    found = (load(path) for path in sorted(folder.glob(f"*/{lab}.jsonl")))
    return [run for run in found if run[0].layout.get("device") == "cuda"]


def told(found: list[Records], tell: Callable[[Records], str]) -> None:
    """Print what `tell` says about each run, with its provenance; one sentence if there is no run."""
    for run in found:
        origin = provenance_line([next(r for r in run if r.kind == "recorded")])
        say(f"{origin[0].upper()}{origin[1:]}: {tell(run)}")
    if not found:
        say(NONE)
