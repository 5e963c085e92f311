"""Slides of every notebook, for a projector and without a network.

    python -m labs.classroom.slides                          # committed outputs, into build/slides
    python -m labs.classroom.slides --source build           # the outputs of this machine's `make course`
    python -m labs.classroom.slides 03_dataparallel_vs_ddp --solutions 03.1 03.3

A question and the cell for its prediction stand on one slide, and what was measured on the next. Solutions are left
out unless asked for ("all", or their ids). Exit code: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from labs.classroom.slides.pages import REVEAL, index_page, slides_page
from labs.kit.check import exercise_ids
from labs.kit.cli import fail
from labs.kit.course import NOTEBOOKS, choose
from labs.kit.errors import BadInput, require
from labs.kit.record import write_atomic


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.classroom.slides",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="notebooks (default: all)")
    parser.add_argument("--source", type=Path, default=NOTEBOOKS, help="folder of the notebooks with outputs")
    parser.add_argument("--out", type=Path, default=NOTEBOOKS.parent / "build" / "slides", help="output folder")
    parser.add_argument("--solutions", nargs="+", default=[], metavar="ID", help='exercises to show solved, or "all"')
    options = parser.parse_args()
    try:
        sources = choose(options.source.resolve(), options.names)
        solved = _solved(options.solutions)
        pages = {path.stem: slides_page(path, solved) for path in sources}
    except BadInput as e:
        fail(parser.prog, str(e))
    out = options.out.resolve()
    shutil.copytree(REVEAL, out / "reveal", dirs_exist_ok=True)
    for stem, page in pages.items():
        write_atomic(out / f"{stem}.html", page)
    write_atomic(out / "index.html", index_page(sources))
    print(f"{len(pages)} sets of slides: open {out / 'index.html'}")
    return 0


def _solved(ids: list[str]) -> set[str]:
    known = exercise_ids() if ids else []  # loads every exercise, and torch
    for i in ids:
        require(i == "all" or i in known, f"there is no exercise {i!r}; there are {', '.join(known)} and all")
    return set(known) if "all" in ids else set(ids)


if __name__ == "__main__":
    sys.exit(main())
