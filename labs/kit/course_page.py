"""The pages that `labs.kit.course` writes: each executed notebook as HTML, and one index of them."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
import nbformat

from labs.kit.cli import BadInput
from labs.kit.mathml import Formulas

if TYPE_CHECKING:
    from labs.kit.cell_times import CellTime

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
    """An image among the outputs of a notebook."""

    src: str
    """Its address: a data: URI, or a path"""
    alt: str
    """Its alternative text, "" when it has none"""
    title: str = ""
    """Of the course's own figures, where their numbers come from"""


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
    """File name of its HTML page, once there is one"""
    thumbnail: Picture | None = None
    slowest: list[CellTime] = field(default_factory=list)
    """Its slowest cells, the slowest first"""

    @classmethod
    def of(cls, source: Path) -> Entry:
        """The entry of a notebook that has not run yet. BadInput if the file is no notebook."""
        try:
            notebook = nbformat.read(source, as_version=4)
        except (ValueError, AttributeError) as e:
            reason = str(e).splitlines()[0][:200]
            raise BadInput(f"{source} is not a notebook ({reason}): restore it with git checkout") from None
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        return cls(source.stem, heading(text, 1) or source.stem, _goals(text))


def heading(markdown: str, level: int) -> str:
    """The text of the first heading of this level, "" if there is none."""
    found = re.search(rf"^#{{{level}}} +(.+)$", markdown, re.MULTILINE)
    return _plain(found[1]) if found else ""


def _goals(markdown: str) -> list[str]:
    """The list items that follow the words "You will"."""
    after = re.split(r"\bYou will\b", markdown, maxsplit=1)[1:]
    block = re.search(r"(?:^[ ]*(?:[-*]|\d+\.) .*\n?(?:[ ]{2,}.*\n?)*)+", after[0], re.MULTILINE) if after else None
    items = re.split(r"^[ ]*(?:[-*]|\d+\.) ", block[0], flags=re.MULTILINE)[1:] if block else []
    return [_plain(" ".join(item.split())) for item in items]


def _plain(markdown: str) -> str:
    """Markdown without its marks for links, code and emphasis."""
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
    """The images of a piece of HTML."""
    parser = _Images()
    parser.feed(markup)
    return parser.found


def pictures(cell: nbformat.NotebookNode) -> list[Picture]:
    """The images among a code cell's outputs, in order: bare PNG, JPEG and SVG data and HTML <img>."""
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
    """Write the executed notebook as an HTML page beside it and note page and first figure in `entry`.

    `folder` is where the notebook's relative paths start. Links to other notebooks lead to their pages.
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
    """Write `out`/index.html: for each notebook its title, goals, time, state, first figure and error."""
    environment = jinja2.Environment(autoescape=True)
    page = environment.from_string(INDEX).render(
        entries=entries,
        passed=sum(e.state == "passed" for e in entries),
        seconds=sum(e.seconds for e in entries),
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    (out / "index.html").write_text(page, encoding="utf-8")
