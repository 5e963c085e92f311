"""Run notebooks in place for a commit, so that each one's outputs come from one run of the current code.

    python -m labs.kit.rerun                        # all of notebooks/
    python -m labs.kit.rerun 03_dataparallel_vs_ddp
    python -m labs.kit.rerun --stale                # only if its cells or code have changed since its last run

This measures, so run nothing else on the machine. A notebook that fails stays as it was. A notebook's metadata says
which cells and code it was run with; --stale compares them. The evidence for its claims goes to records/.
Exit code: 0 all ran, 1 a notebook failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat

from labs.kit import claim_records, fingerprint, timeouts
from labs.kit.cli import fail
from labs.kit.course import NOTEBOOKS, choose, nothing_left, use_own_kernel
from labs.kit.errors import BadInput
from labs.kit.record import provenance, write_atomic

STAMP = "course_run"


def stamp(path: Path) -> dict[str, Any]:
    """Return what a notebook's outputs depend on: its cells, the code they run, the machine and the time."""
    here = provenance()
    where = {k: here[k] for k in ("cpu", "cores", "gpus", "utc", "torch", "python") if k in here}
    return {"cells": fingerprint.notebook(path), "code": fingerprint.code_behind(path), **where}


def stale(path: Path) -> str:
    """Return why a notebook's outputs don't match its cells and this repository's code; "" if they do."""
    kept = nbformat.read(path, as_version=4).metadata.get(STAMP)
    if kept is None:
        return "it does not say which code its outputs came from"
    changed = {"cells": fingerprint.notebook(path), "code": fingerprint.code_behind(path)}
    what = [name for name, now in changed.items() if kept.get(name) != now]
    return f"its {' and '.join(what)} changed after it was run" if what else ""


def rerun(path: Path) -> None:
    """Run all cells in the notebook's folder and write the notebook back with its stamp.

    Raises nbclient's CellExecutionError if a cell fails; the file then stays as it was.
    """
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExecutePreprocessor

    notebook, run_with = nbformat.read(path, as_version=4), stamp(path)
    runner = ExecutePreprocessor(timeout=timeouts.CELL_S, kernel_name="python3", record_timing=False)
    with tempfile.TemporaryDirectory(prefix="labs-evidence-") as folder:
        os.environ.update({claim_records.FOLDER: folder, "COURSE_NOTEBOOK": path.name})  # inherited by the kernel
        runner.preprocess(notebook, {"metadata": {"path": str(path.parent)}})
        for kept in Path(folder).iterdir():
            write_atomic(claim_records.RECORDED / kept.name, kept.read_text(encoding="utf-8"))
    CoalesceStreamsPreprocessor().preprocess(notebook, {})  # printed text arrives in parts, more on a slow machine
    notebook.metadata[STAMP] = run_with
    write_atomic(path, nbformat.writes(notebook) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m labs.kit.rerun", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="notebooks to run (default: all)")
    parser.add_argument("--stale", action="store_true", help="only those whose cells or code have changed")
    options = parser.parse_args()
    use_own_kernel()
    try:
        sources = [p for p in choose(NOTEBOOKS, options.names) if not options.stale or stale(p)]
    except BadInput as e:
        fail(parser.prog, str(e))
    failed = 0
    try:
        with nothing_left():
            for path in sources:
                failed += not _one(path)
    except KeyboardInterrupt:
        print("stopped; the notebook that was running is as it was", file=sys.stderr)
        return 130
    return min(failed, 1)


def _one(path: Path) -> bool:
    start = time.perf_counter()
    try:
        rerun(path)
    except Exception as e:  # a cell's error, or a kernel that died: continue with the next notebook
        print(f"{path.stem}: failed, and left as it was\n{e}", file=sys.stderr)
        return False
    print(f"{path.stem}: run in {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} KB", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
