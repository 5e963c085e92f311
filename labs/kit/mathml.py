"""Formulas of Markdown as MathML, which browsers draw by themselves: pages then need no script from the network."""

from __future__ import annotations

import re

from nbformat import NotebookNode

# A dollar sign opens a formula if no blank follows, and closes it if no blank is before and no digit after it.
FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)", re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


class Formulas:
    """Takes formulas out of Markdown before nbconvert renders it, which would tear MathML apart, and puts them back."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def take_out(self, markdown: str) -> str:
        """`markdown` with a mark for each $formula$ and $$formula$$ outside of code."""
        parts = CODE.split(markdown)
        return "".join(part if n % 2 else FORMULA.sub(self._mark, part) for n, part in enumerate(parts))

    def take_out_of(self, notebook: NotebookNode) -> None:
        """Do so in all Markdown of a notebook, that of its outputs too."""
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.take_out(cell.source)
            for output in cell.get("outputs", []):
                if "text/markdown" in output.get("data", {}):
                    output.data["text/markdown"] = self.take_out("".join(output.data["text/markdown"]))

    def put_back(self, page: str) -> str:
        """The rendered HTML with <math> elements for the marks."""
        return re.sub(r"xFormula(\d+)x", lambda mark: self.found[int(mark[1])], page)

    def _mark(self, found: re.Match[str]) -> str:
        from latex2mathml.converter import convert

        block = found["block"] is not None
        try:
            element = convert(found["block"] or found["inline"], display="block" if block else "inline")
        except Exception:  # its errors have no common class; the formula stays as it was written
            return found[0]
        self.found.append(element)
        return f"xFormula{len(self.found) - 1}x"
