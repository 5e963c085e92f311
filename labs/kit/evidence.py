"""Evidence for claims: saved when a notebook judges its claims, loaded by notebook 11 and labs.claims.

    my/.evidence/03.jsonl                                     this machine's, from running notebook 03
    records/cpu-2-cores-2026-11/claims/03.jsonl               recorded in the run whose outputs are committed
    records/nvidia-h200-2026-11/claims/03.jsonl               recorded on a GPU, for claims that need one

A notebook's evidence is the records of its launches. `call_of` says how to repeat a launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit.lab import lab_module
from labs.kit.record import Record, Records, as_json, load

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "records" / "cpu-2-cores-2026-11" / "claims"
FOLDER = "COURSE_EVIDENCE"
"""Environment variable: the folder for notebooks' evidence instead of my/.evidence."""


def own_folder() -> Path:
    """Return the folder of this machine's evidence."""
    return Path(os.environ.get(FOLDER) or ROOT / "my" / ".evidence")


def keep(notebook: str, evidence: Records) -> None:
    """Save the evidence that judged the claims of `notebook` ("03") in a kernel, replacing an earlier run's.

    Saves only full runs that measured something, no smoke runs. If saving fails, the notebook still shows its verdicts.
    """
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return
    smoke = os.environ.get("COURSE_SMOKE") == "1" or any(r.config.get("smoke") for r in evidence)
    if smoke or not any(r.kind == "measured" for r in evidence):
        return
    with contextlib.suppress(OSError):
        evidence.save(own_folder() / f"{notebook}.jsonl")


def kept(notebook: str, folder: Path | None = None) -> Records:
    """Load the evidence of `notebook` from `folder` (default: this machine's); empty if there is none.

    ValueError names the file, line and field that can't be read.
    """
    path = (folder or own_folder()) / f"{notebook}.jsonl"
    return load(path) if path.is_file() else Records()


def kept_of_gpus(notebook: str, folder: Path = RECORDED.parents[1]) -> list[Records]:
    """Load the evidence of `notebook` from each machine with GPUs, sorted by folder."""
    places = sorted(p for p in folder.glob("*/claims") if p != RECORDED)
    return [found for place in places if len(found := kept(notebook, place))]


def launches(evidence: Iterable[Record]) -> list[Records]:
    """Split records by launch, in order: same lab, configuration, number of ranks and provenance."""
    found: dict[str, list[Record]] = {}
    for r in evidence:
        key = json.dumps([r.lab, r.config, r.layout.get("world_size"), r.provenance], sort_keys=True, default=str)
        found.setdefault(key, []).append(r)
    return [Records(run) for run in found.values()]


@dataclass(frozen=True)
class Call:
    """The call that started a launch. `parameters` holds those that differ from the lab's defaults."""

    lab: str
    nproc: int
    oversubscribe: bool
    parameters: dict[str, Any]

    def __str__(self) -> str:
        more = {"oversubscribe": True} if self.oversubscribe else {}
        said = "".join(f", {name}={value!r}" for name, value in (self.parameters | more).items())
        return f'launch("{self.lab}", nproc={self.nproc}{said})'


def call_of(run: Records) -> Call:
    """Return the call that repeats `run`, the records of one launch. Raises BadInput if its lab no longer exists."""
    first = run[0]
    nproc = int(first.layout.get("world_size") or 1)
    usual = as_json(lab_module(first.lab).Config())
    unusual = {name: value for name, value in first.config.items() if name in usual and value != usual[name]}
    return Call(
        first.lab, nproc, nproc > first.provenance.get("cores", nproc), {k: _tuples(v) for k, v in unusual.items()}
    )


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has no tuples, a Config no lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
