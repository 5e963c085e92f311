"""Records behind claims: saved when a notebook launches its experiments, loaded by labs.claims and notebook 11.

my/.evidence/03.jsonl                             this machine's, from running notebook 03
records/cpu-2-cores-2026-11/claims/03.jsonl       from the run whose outputs are committed
records/nvidia-h200-2026-11/claims/03.jsonl       recorded on a GPU, for claims that need one
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from labs.kit.record import Record, Records, load

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "records" / "cpu-2-cores-2026-11" / "claims"
FOLDER = "COURSE_EVIDENCE"
"""Environment variable: the folder for notebooks' records instead of my/.evidence."""


def own_folder() -> Path:
    """Return the folder of this machine's records."""
    return Path(os.environ.get(FOLDER) or ROOT / "my" / ".evidence")


def keep(notebook: str, evidence: Records) -> None:
    """Save what `notebook` ("03") has launched in this kernel, replacing an earlier run's records.

    Saves only full runs that measured something, no smoke runs. If saving fails, the notebook goes on.
    """
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return
    smoke = os.environ.get("COURSE_SMOKE") == "1" or any(r.config.get("smoke") for r in evidence)
    if smoke or not any(r.kind == "measured" for r in evidence):
        return
    with contextlib.suppress(OSError):
        evidence.save(own_folder() / f"{notebook}.jsonl")


def kept(notebook: str, folder: Path | None = None) -> Records:
    """Load the records of `notebook` from `folder` (default: this machine's); empty if there are none.

    ValueError names the file, line and field that can't be read.
    """
    path = (folder or own_folder()) / f"{notebook}.jsonl"
    return load(path) if path.is_file() else Records()


def kept_of_gpus(notebook: str, folder: Path = RECORDED.parents[1]) -> list[Records]:
    """Load the records of `notebook` from each machine with GPUs, sorted by folder."""
    places = sorted(p for p in folder.glob("*/claims") if p != RECORDED)
    return [found for place in places if len(found := kept(notebook, place))]


def launches(evidence: Iterable[Record]) -> list[Records]:
    """Split records by launch, in order: same lab, configuration, number of ranks and provenance."""
    found: dict[str, list[Record]] = {}
    for r in evidence:
        key = json.dumps([r.lab, r.config, r.layout.get("world_size"), r.provenance], sort_keys=True, default=str)
        found.setdefault(key, []).append(r)
    return [Records(run) for run in found.values()]
