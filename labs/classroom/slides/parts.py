"""Decide which part of which cell is shown, and where a slide begins.

slide: to the right, at every level 1 or 2 heading. subslide: below. fragment: on the same slide, after one more key
press. "-": on the same slide at once. A measured result is never on the screen together with its question.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell

from labs.kit.check import get_exercise

PAGE_CHARACTERS = 900  # of text, still readable from the back row
TABLE_CHARACTERS = 1200
REMARK_CHARACTERS = 350  # a text this short stays with the result it describes
FOLDED = re.compile(r"<details\b[^>]*>\s*<summary>(.*?)</summary>.*?</details>", re.DOTALL)
CHECKED = re.compile(r"""^check\(\s*["']([\d.]+)["']""", re.MULTILINE)
ANSWERS = re.compile(r"\.reveal\(|launch\(|run_on_ranks\(|show_figure\(")


def parts_of(cells: list[NotebookNode], solved: set[str]) -> list[NotebookNode]:
    """Return the shown parts of the cells, in order, with slide types, and solutions of the exercises in `solved`."""
    shown: list[NotebookNode] = []
    for cell in cells:
        if cell.cell_type == "markdown":
            after_result = bool(shown) and shown[-1].cell_type == "code" and bool(shown[-1].outputs)
            shown += _texts(cell.source, cell.get("attachments", {}), after_result)
        elif cell.cell_type == "code" and not _is_set_up(cell):
            shown += _code(cell, solved)
    return shown


def _is_set_up(cell: NotebookNode) -> bool:
    """Return whether a cell only sets up: no code, the parameters, or imports."""
    try:
        body = ast.parse(cell.source).body
    except SyntaxError:  # a magic
        return False
    return "parameters" in cell.metadata.get("tags", []) or all(
        isinstance(n, ast.Import | ast.ImportFrom) for n in body
    )


def _code(cell: NotebookNode, solved: set[str]) -> Iterator[NotebookNode]:
    """Yield the source for what the learner writes, source and results for a launch, only results for the rest."""
    if CHECKED.search(cell.source) or "TODO" in cell.source or "predict(" in cell.source:
        yield _typed(new_code_cell(cell.source), "-")
        yield from (_solution(i) for i in CHECKED.findall(cell.source) if i in solved)
        if "predict(" in cell.source and ANSWERS.search(cell.source):  # never beside the question
            yield from (_typed(part, "subslide") for part in _results(cell.outputs))
    elif "launch(" in cell.source or "run_on_ranks(" in cell.source:
        progress = [
            o for o in cell.outputs if 'class="labs-progress"' in "".join(o.get("data", {}).get("text/html", ""))
        ]
        yield _typed(new_code_cell(cell.source, outputs=progress), "fragment")
        yield from _results([o for o in cell.outputs if o not in progress])
    else:
        yield from _results(cell.outputs)


def _texts(source: str, images: dict, after_result: bool) -> Iterator[NotebookNode]:
    """Yield a slide for each heading, and more if it would be too long. Drops folded hints, which aren't for a room."""
    source = re.sub(r"<details>.*?</details>", "", source, flags=re.DOTALL)
    for section in filter(None, map(str.strip, re.split(r"^(?=#{1,3} )", source, flags=re.MULTILINE))):
        kind = "slide" if re.match(r"##? ", section) else "subslide"
        if after_result and not section.startswith("#") and len(section) <= REMARK_CHARACTERS:
            kind = "fragment"
        for text in _pages(section):
            shown = {name: image for name, image in images.items() if f"(attachment:{name}" in text}
            yield _typed(new_markdown_cell(text, attachments=shown), kind)
            kind = "subslide"


def _pages(text: str) -> list[str]:
    """Join paragraphs into pages of at most PAGE_CHARACTERS; a longer paragraph or code block stays whole."""
    pages: list[str] = []
    for paragraph in re.split(r"\n\n(?!\s)", text):
        in_code = bool(pages) and pages[-1].count("```") % 2 == 1
        if pages and (in_code or len(pages[-1]) + len(paragraph) <= PAGE_CHARACTERS):
            pages[-1] += "\n\n" + paragraph
        else:
            pages.append(paragraph)
    return pages


def _results(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Yield outputs without their source. A long table is cut into pages."""
    markup = [_html(o) for o in outputs]
    if len(outputs) == 1 and "<table" in markup[0]:
        for page in table_pages(markup[0]):
            yield _shown([NotebookNode(outputs[0], data=NotebookNode({"text/html": page}))], "subslide")
    elif outputs:
        large = re.search("<table|<img|<pre|```", "".join(markup + [_markdown(o) for o in outputs]))
        yield _shown(outputs, "subslide" if large else "fragment")


def _html(output: NotebookNode) -> str:
    return "".join(output.get("data", {}).get("text/html", ""))


def _markdown(output: NotebookNode) -> str:
    return "".join(output.get("data", {}).get("text/markdown", ""))


def table_pages(markup: str) -> list[str]:
    """Split an HTML table into tables of at most TABLE_CHARACTERS of text, each with the head; notes go under the last.

    Folded parts (`<details>`) show only their summary.
    """
    markup = FOLDED.sub(r"<p>\1</p>", markup)
    body = re.search(r"(?<=<tbody>).*(?=</tbody>)", markup, re.DOTALL)
    rows = re.findall(r"<tr\b.*?</tr>", body[0], re.DOTALL) if body else []
    pages: list[list[str]] = [[]]
    for row in rows:
        if pages[-1] and sum(map(_characters, [*pages[-1], row])) > TABLE_CHARACTERS:
            pages.append([])
        pages[-1].append(row)
    if not rows:
        return [markup]
    head, foot = markup[: body.start()], markup[body.end() :]
    close = foot.partition("</table>")[0] + "</table>"
    return [head + "".join(page) + (foot if page is pages[-1] else close) for page in pages]


def _characters(row: str) -> int:
    return len(re.sub(r"<[^>]*>", "", row)) + 40  # even a short row takes a line


def _shown(outputs: list[NotebookNode], kind: str) -> NotebookNode:
    cell = new_code_cell("", outputs=outputs)
    cell.metadata["transient"] = {"remove_source": True}
    return _typed(cell, kind)


def _solution(exercise_id: str) -> NotebookNode:
    source = inspect.getsource(get_exercise(exercise_id).reference).rstrip()
    return _typed(new_markdown_cell(f"### {exercise_id}: one solution\n\n```python\n{source}\n```"), "subslide")


def _typed(cell: NotebookNode, kind: str) -> NotebookNode:
    cell.metadata["slideshow"] = {"slide_type": kind}
    return cell
