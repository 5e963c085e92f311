"""From a notebook with outputs to a page of slides, and the page that lists them."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labs.classroom.slides.parts import parts_of
from labs.kit.errors import require
from labs.kit.notebook_report import Entry, Formulas

HERE = Path(__file__).parent
REVEAL = HERE / "reveal"


def slides_page(path: Path, solved: set[str] = frozenset()) -> str:
    """The HTML of one notebook's slides, with the solutions of the exercises in `solved`.

    Raises:
        BadInput: the file is no notebook, or holds no outputs, so there is nothing to show.
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
    """A page with a link to each set of slides."""
    entries = [Entry.of(p) for p in sources]
    rows = [f'<li><a href="{e.name}.html">{e.name[:2]}: {html.escape(e.title)}</a></li>' for e in entries]
    style = "body { font: 24px/1.8 system-ui, sans-serif; margin: 3rem auto; max-width: 45rem } li { list-style: none }"
    head = f'<meta charset="utf-8"><title>Slides</title><style>{style}</style>'
    keys = "<p>Space goes on, Shift-Space back, Esc shows all slides, B blanks the screen.</p>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body><ul>{"".join(rows)}</ul>{keys}</body></html>\n'


def _read(path: Path) -> NotebookNode:
    Entry.of(path)  # BadInput if it is no notebook
    notebook = nbformat.read(path, as_version=4)
    ran = any(c.outputs for c in notebook.cells if c.cell_type == "code")
    require(ran, f"{path} has no outputs: run `make course`, then add --source build")
    return notebook
