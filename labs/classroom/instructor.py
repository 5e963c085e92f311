"""The parts of INSTRUCTOR.md that are computed: minutes, agendas, and what the committed notebooks found.

    python -m labs.classroom.instructor                              # write them anew
    python -m labs.classroom.instructor --keep build/minutes.json    # first keep this `make course` in records/

A test compares them with what this module writes, so no number in that page is typed by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

import nbformat

from labs.classroom.agenda import RECORD, agenda, course, seconds_of, table
from labs.classroom.plans import PLANS
from labs.kit.cli import fail
from labs.kit.course import NOTEBOOKS
from labs.kit.errors import BadInput, require
from labs.kit.notebook_report import heading, pictures
from labs.kit.record import Record, Records, attach_provenance, load, write_atomic
from labs.kit.rerun import STAMP

PAGE = NOTEBOOKS.parent / "INSTRUCTOR.md"
STARTS = {"half": "13:00"}


def blocks() -> dict[str, str]:
    """The computed parts of the page, by name."""
    found = course()
    plans = {name: agenda(name, found, STARTS.get(name, "09:00")) for name in PLANS}
    return {"minutes": table(found), **plans, "expected": expected()}


def expected() -> str:
    """What each figure of the committed notebooks says, in the first sentence of its alternative text."""
    lines = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook, section = nbformat.read(path, as_version=4), ""
        run = notebook.metadata.get(STAMP, {})
        lines.append(f"\n**{path.stem}**, run on {run.get('cpu', 'a machine unknown')}, {run.get('utc', '')[:10]}:\n")
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                section = heading(cell.source, 2) or section
            else:
                said = [first_sentence(p.alt) for p in pictures(cell) if not p.alt.startswith("Use over")]
                lines += [f"* {section} *{sentence}*" for sentence in said]
    return "\n".join(lines).strip()


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence."""
    return re.split(r"(?<=\.) (?=[A-Z0-9])", text, maxsplit=1)[0]


def with_blocks(text: str, written: dict[str, str]) -> str:
    """`text` with each part between `<!-- computed: name -->` and `<!-- end -->` replaced. BadInput if one lacks."""
    for name, block in written.items():
        mark = f"<!-- computed: {name} -->\n"
        require(mark in text, f"{PAGE.name} has no line {mark.strip()}: put it back, with <!-- end --> under it")
        before, rest = text.split(mark, 1)
        text = f"{before}{mark}\n{block}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def keep(path: Path) -> Path:
    """Write the minutes.json at `path` as a record of this machine, now; notebooks that it lacks keep theirs."""
    rows = [
        Record("course", "section_s", "s", (seconds,), case={"notebook": notebook, "section": section})
        for (notebook, section), seconds in seconds_of(path).items()
    ]
    run = {r.case["notebook"] for r in rows}
    others = (
        [replace(r, kind="measured") for r in load(RECORD) if r.case["notebook"] not in run] if RECORD.is_file() else []
    )
    return Records([*others, *attach_provenance(rows)]).save(RECORD)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.classroom.instructor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--keep", type=Path, metavar="MINUTES_JSON", help="put this into records/ first")
    options = parser.parse_args()
    try:
        if options.keep:
            print(f"saved to {keep(options.keep)}")
        write_atomic(PAGE, with_blocks(PAGE.read_text("utf-8"), blocks()))
    except BadInput as e:
        fail(parser.prog, str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
