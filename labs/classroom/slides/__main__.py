"""Slides of every notebook, for a projector and without a network.

    python -m labs.classroom.slides                          # committed outputs, into build/slides
    python -m labs.classroom.slides --source build           # the outputs of this machine's `make course`
    python -m labs.classroom.slides 03_dataparallel_vs_ddp --solutions 03.1 03.3

A question and the cell for its prediction share a slide; the result is on the next. Solutions appear only if you ask
for them ("all", or their ids). Exit code: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labs.classroom.slides.parts import parts_of
from labs.kit.check import exercise_ids
from labs.kit.cli import fail
from labs.kit.course import NOTEBOOKS, choose
from labs.kit.errors import BadInput, require
from labs.kit.notebook_report import Entry, Formulas
from labs.kit.record import write_atomic

HERE = Path(__file__).parent
REVEAL = HERE / "reveal"


def slides_page(path: Path, solved: set[str] = frozenset()) -> str:
    """Return the HTML of one notebook's slides, with the solutions of the exercises in `solved`.

    Raises:
        BadInput: if the file isn't a notebook or has no outputs.
    """
    from nbconvert import SlidesExporter

    notebook, formulas = _read(path), Formulas()
    formulas.take_out_of(notebook)
    notebook.cells = parts_of(notebook.cells, solved)
    exporter = SlidesExporter(
        template_name="template",
        extra_template_basedirs=[str(HERE)],
        embed_images=True,
        reveal_url_prefix="reveal",
        reveal_theme="course",
        require_js_url="",
        jquery_url="",
        mathjax_url="",
        mermaid_js_url="",
    )
    resources = {"metadata": {"name": Entry.of(path).title, "path": str(path.parent)}}
    page, _ = exporter.from_notebook_node(notebook, resources=resources)
    return re.sub(r'href="(?:\./)?([\w-]+)\.ipynb(#[^"]*)?"', r'href="\1.html"', formulas.put_back(page))


def index_page(sources: list[Path]) -> str:
    """Return a page with a link to each notebook's slides."""
    entries = [Entry.of(p) for p in sources]
    rows = [f'<li><a href="{e.name}.html">{e.name[:2]}: {html.escape(e.title)}</a></li>' for e in entries]
    style = "body { font: 24px/1.8 system-ui, sans-serif; margin: 3rem auto; max-width: 45rem } li { list-style: none }"
    head = f'<meta charset="utf-8"><title>Slides</title><style>{style}</style>'
    keys = "<p>Space moves forward, Shift-Space back, Esc shows all slides, B blanks the screen.</p>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body><ul>{"".join(rows)}</ul>{keys}</body></html>\n'


def _read(path: Path) -> NotebookNode:
    Entry.of(path)  # raises BadInput if it isn't a notebook
    notebook = nbformat.read(path, as_version=4)
    ran = any(c.outputs for c in notebook.cells if c.cell_type == "code")
    require(ran, f"{path} has no outputs: run `make course`, then add --source build")
    return notebook


def main() -> int:
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
    known = exercise_ids() if ids else []  # imports every exercise, and torch
    for i in ids:
        require(i == "all" or i in known, f"there is no exercise {i!r}; there are {', '.join(known)} and all")
    return set(known) if "all" in ids else set(ids)


if __name__ == "__main__":
    sys.exit(main())
