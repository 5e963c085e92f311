"""Report on executed notebooks: cell times (from papermill), HTML pages and an index.

Formulas become MathML, which browsers render without scripts from the network.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import nbformat
from nbformat import NotebookNode

from labs.kit.errors import BadInput

CELL_LIMIT_S, COURSE_LIMIT_S = 30.0, 600.0
"""Limits for a cell and for all notebooks, on 2 quiet CPU cores."""
REFERENCE_STEPS = 4_000_000
REFERENCE_S = 0.16
"""What `reference_s` took on the cores that these limits are for."""
TOLD = 1.2  # slowness above which a line is printed


@dataclass(frozen=True)
class CellTime:
    notebook: str
    number: int
    """The number in its prompt: [14]"""
    seconds: float
    section: str
    """The "## " heading above it, or the notebook's title"""
    source: str
    """The cell's first line"""

    def __str__(self) -> str:
        return f"{self.notebook} cell [{self.number}]: {self.seconds:.1f} s  {self.source}"


def cell_times(executed: Path) -> list[CellTime]:
    """Return the times of the code cells that ran, in order. Empty if papermill didn't run the notebook."""
    found, section = [], executed.stem
    for cell in nbformat.read(executed, as_version=4).cells:
        if cell.cell_type == "markdown":
            section = heading(cell.source, 2) or (not found and heading(cell.source, 1)) or section
        seconds = cell.metadata.get("papermill", {}).get("duration")
        if cell.cell_type == "code" and cell.execution_count and seconds is not None:
            first = next((line for line in cell.source.splitlines() if line.strip()), "")
            found.append(CellTime(executed.stem, cell.execution_count, seconds, section, first.strip()))
    return found


def slowest(times: list[CellTime], count: int) -> list[CellTime]:
    return sorted(times, key=lambda t: t.seconds, reverse=True)[:count]


def reference_s() -> float:
    """Return the seconds that a fixed piece of Python takes now, as a measure of how slow or busy the machine is."""
    start = time.perf_counter()
    total = 0
    for i in range(REFERENCE_STEPS):
        total += i * i % 7
    return time.perf_counter() - start


def slowness(references_s: Sequence[float]) -> float:
    """Return how much slower this machine was than the one the limits are for: at least 1, and 1 if unknown.

    Uses the median of `references_s`, measured between the notebooks.
    """
    return max(1.0, statistics.median(references_s) / REFERENCE_S) if references_s else 1.0


def over_the_limits(times: list[CellTime], course_s: float, slower: float = 1.0) -> list[str]:
    """Return one line for each cell, and for the course, that exceeded its limit.

    The limits are multiplied by `slower`; if that matters, a line says so.
    """
    cell_s, all_s = CELL_LIMIT_S * slower, COURSE_LIMIT_S * slower
    lines = [f"over {cell_s:.0f} s: {cell}" for cell in slowest(times, len(times)) if cell.seconds > cell_s]
    if course_s > all_s:
        lines.append(f"over {all_s / 60:.0f} min: all notebooks together took {course_s / 60:.1f} min")
    longest = max((t.seconds for t in times), default=0.0)
    if slower >= TOLD and (longest > CELL_LIMIT_S or course_s > COURSE_LIMIT_S):
        lines.append(
            f"This machine was {slower:.1f} times slower than the one the limits are for ({CELL_LIMIT_S:.0f} s a cell, "
            f"{COURSE_LIMIT_S / 60:.0f} min in all): here they are {cell_s:.0f} s and {all_s / 60:.0f} min."
        )
    return lines


INDEX = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ passed }} of {{ entries | length }} notebooks passed</title>
<style>
 :root { color-scheme: light dark }
 body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
 article { display: flex; flex-wrap: wrap; gap: 1rem 2rem; padding: 1.2rem 0; border-top: 1px solid #8886 }
 article > div { flex: 1 1 24rem; min-width: 0 } h2 { margin: 0; font-size: 1.25rem }
 article > a { flex: 0 1 20rem } img { width: 100%; background: #fff } ul { margin: .4rem 0; padding-left: 1.2rem }
 pre { overflow-x: auto; padding: .6rem; background: #8882; font-size: .8rem }
 .state { font-weight: 600 } .failed .state { color: #d55e00 } .passed .state { color: #009e73 }
</style></head><body>
<h1>Course results</h1>
<p>{{ passed }} of {{ entries | length }} notebooks passed,
{{ "%.1f" | format(seconds / 60) }} min in all. {{ when }}</p>
{% for e in entries %}<article class="{{ e.state }}"><div>
<h2>{% if e.page %}<a href="{{ e.page }}">{{ e.title }}</a>{% else %}{{ e.title }}{% endif %}</h2>
<p>{{ e.name }}: <span class="state">{{ e.state }}</span>
{%- if e.seconds %}, {{ "%.1f" | format(e.seconds / 60) }} min{% endif %}</p>
<ul>{% for goal in e.goals %}<li>{{ goal }}</li>{% endfor %}</ul>
{% if e.slowest %}<details><summary>Slowest cells</summary><ol>
{% for t in e.slowest %}<li>[{{ t.number }}] {{ "%.1f" | format(t.seconds) }} s, {{ t.section }}:
<code>{{ t.source }}</code></li>{% endfor %}</ol></details>{% endif %}
{% if e.error %}<pre>{{ e.error }}</pre>{% endif %}</div>
{% if e.thumbnail %}<a href="{{ e.page }}"><img src="{{ e.thumbnail.src }}" alt="{{ e.thumbnail.alt }}"></a>{% endif %}
</article>{% endfor %}
</body></html>
"""


@dataclass(frozen=True)
class Picture:
    """An image among a notebook's outputs."""

    src: str
    """A data: URI, or a path"""
    alt: str
    """Alternative text; "" if it has none"""
    title: str = ""
    """Provenance of the numbers, for the course's own figures"""


@dataclass
class Entry:
    """One notebook on the index page."""

    name: str
    title: str
    goals: list[str]
    state: str = "waiting"
    """waiting, running, passed or failed"""
    seconds: float = 0.0
    error: str = ""
    page: str = ""
    """File name of its HTML page, once it exists"""
    thumbnail: Picture | None = None
    slowest: list[CellTime] = field(default_factory=list)
    """Its slowest cells, slowest first"""

    @classmethod
    def of(cls, source: Path) -> Entry:
        """Return the entry of a notebook that hasn't run yet. BadInput if the file isn't a notebook."""
        try:
            notebook = nbformat.read(source, as_version=4)
        except (ValueError, AttributeError) as e:
            reason = str(e).splitlines()[0][:200]
            raise BadInput(f"{source} is not a notebook ({reason}): restore it with git checkout") from None
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        return cls(source.stem, heading(text, 1) or source.stem, _goals(text))


def heading(markdown: str, level: int) -> str:
    """Return the text of the first heading of this level; "" if there is none."""
    found = re.search(rf"^#{{{level}}} +(.+)$", markdown, re.MULTILINE)
    return _plain(found[1]) if found else ""


def _goals(markdown: str) -> list[str]:
    """Return the list items that follow the words "You will"."""
    after = re.split(r"\bYou will\b", markdown, maxsplit=1)[1:]
    block = re.search(r"(?:^[ ]*(?:[-*]|\d+\.) .*\n?(?:[ ]{2,}.*\n?)*)+", after[0], re.MULTILINE) if after else None
    items = re.split(r"^[ ]*(?:[-*]|\d+\.) ", block[0], flags=re.MULTILINE)[1:] if block else []
    return [_plain(" ".join(item.split())) for item in items]


def _plain(markdown: str) -> str:
    """Remove Markdown's link, code and emphasis marks."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "").replace("**", "").strip()


class _Images(HTMLParser):
    """Collects the <img> elements of a piece of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Picture] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            values = dict(attributes)
            texts = [(values.get(name) or "").strip() for name in ("alt", "title")]
            self.found.append(Picture(values.get("src") or "", *texts))


def html_pictures(markup: str) -> list[Picture]:
    parser = _Images()
    parser.feed(markup)
    return parser.found


def pictures(cell: nbformat.NotebookNode) -> list[Picture]:
    """Return the images among a code cell's outputs, in order: PNG, JPEG and SVG data, and HTML <img>."""
    found: list[Picture] = []
    for output in cell.get("outputs", []):
        for mime, data in output.get("data", {}).items():
            if mime == "text/html":
                found += html_pictures("".join(data))
            elif mime.startswith("image/"):
                metadata = output.get("metadata", {})
                alt = metadata.get(mime, {}).get("alt") or metadata.get("alt") or ""
                encoding = "utf8," if mime == "image/svg+xml" else "base64,"
                found.append(Picture(f"data:{mime};{encoding}{''.join(data)}", alt))
    return found


def write_page(notebook: Path, entry: Entry, *, folder: Path) -> None:
    """Write the executed notebook as an HTML page beside it; set `page` and `thumbnail` of `entry`.

    `folder` is the base of the notebook's relative paths. Links to other notebooks become links to their pages.
    """
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(embed_images=True, require_js_url="", mermaid_js_url="", mathjax_url="")
    node, formulas = nbformat.read(notebook, as_version=4), Formulas()
    formulas.take_out_of(node)
    resources = {"metadata": {"name": entry.title, "path": str(folder)}}
    page, _ = exporter.from_notebook_node(node, resources=resources)
    page = re.sub(r'<script src=""> ?</script>', "", formulas.put_back(page))
    page = re.sub(r'href="(?:\./)?([\w-]+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', page)
    notebook.with_suffix(".html").write_text(page, encoding="utf-8")
    entry.page = notebook.with_suffix(".html").name
    figures = [p for cell in node.cells for p in pictures(cell) if p.src.startswith("data:image/png")]
    entry.thumbnail = figures[0] if figures else None


def write_index(entries: list[Entry], out: Path) -> None:
    """Write `out`/index.html: each notebook's title, goals, time, state, first figure and error."""
    environment = jinja2.Environment(autoescape=True)
    page = environment.from_string(INDEX).render(
        entries=entries,
        passed=sum(e.state == "passed" for e in entries),
        seconds=sum(e.seconds for e in entries),
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    (out / "index.html").write_text(page, encoding="utf-8")


# A dollar sign opens a formula if no space follows. It closes one if no space precedes and no digit follows it.
FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)", re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


class Formulas:
    """Takes formulas out of Markdown before nbconvert renders it, which would break MathML, and puts them back."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def take_out(self, markdown: str) -> str:
        """Return `markdown` with a placeholder for each $formula$ and $$formula$$ outside code."""
        parts = CODE.split(markdown)
        return "".join(part if n % 2 else FORMULA.sub(self._mark, part) for n, part in enumerate(parts))

    def take_out_of(self, notebook: NotebookNode) -> None:
        """Do that in all Markdown of a notebook, outputs included."""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.take_out(cell.source)
            for output in cell.get("outputs", []):
                if "text/markdown" in output.get("data", {}):
                    output.data["text/markdown"] = self.take_out("".join(output.data["text/markdown"]))

    def put_back(self, page: str) -> str:
        """Replace the placeholders in rendered HTML with <math> elements."""
        return re.sub(r"xFormula(\d+)x", lambda mark: self.found[int(mark[1])], page)

    def _mark(self, found: re.Match[str]) -> str:
        from latex2mathml.converter import convert

        block = found["block"] is not None
        try:
            element = convert(found["block"] or found["inline"], display="block" if block else "inline")
        except Exception:  # its errors have no common base class; keep the formula as written
            return found[0]
        self.found.append(element)
        return f"xFormula{len(self.found) - 1}x"
