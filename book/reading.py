"""What stands in a notebook, as far as the book asks: its title, its sections, what it needs, when and where it ran."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CODE_BLOCK = re.compile(r"^ *(```+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#{1,6}) +(.+?)#* *$", re.MULTILINE)


def plain(markdown: str) -> str:
    """Markdown without its marks for code and emphasis, and of a link only its words."""
    return re.sub(r"(?<!\w)[*_]+|[*]+|`", "", re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", markdown)).strip()


def slug(heading: str) -> str:
    """The name by which a link finds a heading: "4. When does it pay?" is "4-when-does-it-pay".

    What GitHub and JupyterLab write after the # comes to the same when it is put through this function.
    """
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-")


@dataclass(frozen=True)
class Section:
    """A heading of the second level, "" for what stands before the first one, and what a reader finds under it.

    Code is left out: a word of the glossary that is a variable's name explains nothing.
    """

    heading: str
    text: str


@dataclass(frozen=True)
class Notebook:
    """A notebook file; `path` is relative to the repository."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, root: Path, path: Path) -> Notebook:
        return cls(path.relative_to(root), json.loads(path.read_text("utf-8")))

    @property
    def number(self) -> str:
        """ "03" of 03_dataparallel_vs_ddp"""
        return self.path.name[:2]

    @cached_property
    def text(self) -> str:
        """All its Markdown cells, without code blocks."""
        cells = ("".join(c["source"]) for c in self.content["cells"] if c["cell_type"] == "markdown")
        return CODE_BLOCK.sub("", "\n\n".join(cells))

    @property
    def title(self) -> str:
        return plain(HEADING.search(self.text)[2])

    @property
    def short(self) -> str:
        """The title up to its colon."""
        return self.title.partition(":")[0]

    @cached_property
    def sections(self) -> list[Section]:
        seen = []
        for cell in self.content["cells"]:
            if cell["cell_type"] == "markdown":
                seen.append("".join(cell["source"]))
            seen += [f" {shown}".replace("\n", "\n ") for shown in map(text_of, cell.get("outputs", ()))]
        text = CODE_BLOCK.sub("", "\n\n".join(seen))
        before, *parts = re.split(r"^## +(.+)$", text, flags=re.MULTILINE)
        named = [Section(plain(heading), text) for heading, text in zip(parts[::2], parts[1::2], strict=True)]
        return [Section("", before), *named]

    def section(self, heading: str) -> str:
        """The text under a heading, "" if there is none."""
        return next((s.text for s in self.sections if s.heading == heading), "")

    @property
    def run(self) -> str:
        """Where and when its outputs came from, "" if the file does not say."""
        run = self.content["metadata"].get("course_run")
        if not run:
            return ""
        devices = ", ".join(run["gpus"]) or f"{run['cpu']}, {run['cores']} cores"
        return f"{devices}, torch {run['torch']}, {run['utc'][:10]}"


def text_of(output: dict[str, Any]) -> str:
    """An output as text: Markdown where it has some, with its code blocks."""
    data = output.get("data", {})
    return "".join(data.get("text/markdown") or data.get("text/plain") or output.get("text") or "")


def notebooks(root: Path) -> list[Notebook]:
    """The notebooks of the course in their order."""
    return [Notebook.read(root, path) for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
