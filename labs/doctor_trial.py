"""How often is the doctor right about scripts that it wasn't built with? Runs it once on each case of a folder.

    python -m labs.doctor_trial records/doctor_trial --out trial.json
    python -m labs.doctor_trial records/doctor_trial --only clip --jobs 2

FOLDER/cases.tsv has a line for each case, with tabs between:

    file       script, below FOLDER
    ranks      1, or so many that torchrun starts
    args       of the script
    kind       wrong, slow or healthy
    family     of a wrong one, 1 to 8: ranks, effect, shapes, accumulation, checkpoint, data, validation, workers
    expected   what is wrong or slow, in one sentence; of a public script, its origin
    line       of the fault; several with commas between, if each is right
    object     words (a regular expression) that name the faulty object where the page names another line of it
    unseen     yes: nobody who wrote the doctor had seen the script or its kind of fault before this run

A case is "named" if the page's first line names the right kind of problem, and its line (within 2 lines) or its object.
Which words name the object was decided by reading the pages. A script is "accused" if its page says "wrong result" and
its results are right. Scripts that aren't in the folder (public ones: see its README) are skipped.

About a minute for each case on 2 quiet cores. Writes a JSON list with one row for each case.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.doctor import report
from labs.doctor.bottlenecks import SLOW, WRONG
from labs.kit.cli import fail
from labs.kit.errors import BadInput, require
from labs.kit.record import provenance, write_atomic

PROG = "python -m labs.doctor_trial"
COLUMNS = ("file", "ranks", "args", "kind", "family", "expected", "line", "object", "unseen")
PROBES = {
    "1": ("replicas",),
    "2": ("effect",),
    "3": ("shapes", "warning"),
    "4": ("accumulation",),
    "5": ("checkpoint",),
    "6": ("data",),
    "7": ("validation",),
    "8": ("workers",),
}
"""Names of the findings that are of a family."""
NEAR = 2
"""Lines between the fault and the line that the page names."""
LIMIT_S = 900.0


@dataclass(frozen=True)
class Case:
    """A line of cases.tsv."""

    file: str
    ranks: int
    args: str
    kind: str
    family: str
    expected: str
    line: str
    object: str
    unseen: bool


def read_cases(folder: Path) -> list[Case]:
    """Return the cases of a folder. BadInput names the line of cases.tsv that can't be read."""
    path, cases = folder / "cases.tsv", []
    require(path.is_file(), f"there is no {path}")
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 2):
            try:
                case = Case(**{**row, "ranks": int(row["ranks"]), "unseen": row["unseen"] == "yes"})
                [int(line) for line in case.line.split(",") if line]
                known = case.kind in ("wrong", "slow", "healthy") and (case.kind != "wrong" or case.family in PROBES)
            except (KeyError, TypeError, ValueError):
                known = False
            require(known, f"{path}, line {number}: the columns are {', '.join(COLUMNS)}; see {PROG} --help")
            cases.append(case)
    return cases


def command(case: Case, script: Path, out: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of the doctor on a case."""
    start = [sys.executable]
    if case.ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    return [*start, "-m", "labs.doctor", "--out", str(out), *options, str(script), *shlex.split(case.args)]


def run_doctor(case: Case, folder: Path, options: Sequence[str] = ()) -> tuple[report.Report | None, float]:
    """Run the doctor on a case, in an empty working folder: its report, None if it left none, and seconds."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as work:
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": work}
        argv = command(case, (folder / case.file).resolve(), Path(work, "report"), options)
        begun = time.perf_counter()
        try:
            subprocess.run(argv, cwd=work, env=env, capture_output=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return None, time.perf_counter() - begun
        seconds = time.perf_counter() - begun
        try:
            return report.load(Path(work, "report", "report.json")), seconds
        except BadInput:
            return None, seconds


def judge(case: Case, seen: report.Report | None) -> dict[str, Any]:
    """Return the first line of a page, and whether it names the case's fault or accuses a right result."""
    wrong = [] if seen is None else [f for f in seen.findings if f.kind == WRONG]
    first_line = "no report" if seen is None else report.headline(seen)
    if case.kind != "wrong" and seen is None:
        return {"first_line": first_line, "named": None, "accused": None}
    accused = None if case.kind == "wrong" else bool(wrong)
    if case.kind == "healthy":
        return {"first_line": first_line, "named": None, "accused": accused}
    problems = [] if seen is None else (wrong or [f for f in seen.problems if f.kind == SLOW])
    first = next(iter(problems), None)
    named = False
    if first is not None and (first.kind == WRONG) == (case.kind == "wrong"):
        number = re.search(rf"{re.escape(Path(case.file).name)}:(\d+)$", first.line)
        lines = [int(line) for line in case.line.split(",") if line]
        near = number is not None and any(abs(int(number[1]) - line) <= NEAR for line in lines)
        words = bool(case.object) and re.search(case.object, f"{first_line} {first.where}") is not None
        named = (case.kind == "slow" or first.name in PROBES[case.family]) and (near or words)
    return {"first_line": first_line, "named": named, "accused": accused}


def row_of(case: Case, folder: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run and judge one case: a row of the table."""
    seen, seconds = run_doctor(case, folder, options)
    known = {"file": case.file, "ranks": case.ranks, "kind": case.kind, "family": case.family or None}
    known |= {"expected": case.expected, "line": case.line or None, "unseen": case.unseen}
    made = provenance()
    machine = f"{made['cpu']}, {made['cores']} cores"
    origin = {"date": made["utc"][:10], "commit": made["commit"], "machine": machine, "torch": made["torch"]}
    return known | judge(case, seen) | {"seconds": round(seconds, 1)} | origin


def counts(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many of each kind were named or accused."""
    lines = []
    for unseen in (True, False):
        part = [row for row in rows if row["unseen"] == unseen]
        for kind, column in (("wrong", "named"), ("slow", "named"), ("healthy", "accused")):
            judged = [row[column] for row in part if row["kind"] == kind and row[column] is not None]
            if judged:
                lines.append(f"{'unseen' if unseen else 'seen'}, {kind}: {sum(judged)} of {len(judged)} {column}")
    return "\n".join(lines)


def main() -> None:
    """Run the cases, print what each page says first, and write the table."""
    parser = argparse.ArgumentParser(PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("doctor_trial.json"), help="default doctor_trial.json")
    parser.add_argument("--only", default="", help="cases whose file has this in its name")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time (default 1: times are comparable)")
    given, options = parser.parse_known_args()
    try:
        cases = [case for case in read_cases(given.folder) if given.only in case.file]
    except BadInput as e:
        fail(PROG, str(e))
    there = [case for case in cases if (given.folder / case.file).is_file()]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for row in pool.map(lambda case: row_of(case, given.folder, options), there):
            rows.append(row)
            print(f"{row['file']}, named {row['named']}, accused {row['accused']}: {row['first_line']}", flush=True)
            write_atomic(given.out, "[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")
    if len(there) < len(cases):
        print(f"skipped, not in {given.folder}: {', '.join(c.file for c in cases if c not in there)}")
    print(counts(rows))


if __name__ == "__main__":
    main()
