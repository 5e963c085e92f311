"""The pages of the book, as a folder of Markdown and notebooks for Sphinx.

    index.md                README.md
    notebooks/              as committed, but figures are files, and a line says where the outputs came from
    map.md, claims.md       made from the notebooks
    GLOSSARY.md             with the sections in which each word is used
    docs/, INSTRUCTOR.md    as they are, and so is every other Markdown file that one of the pages links to
    code/                   a page for every other file that one of them links to: links work without a network, too

Pages lie where they lie in the repository, so links between them stay as they are written.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

import claim_table
import glossary
import notebook_map
from reading import Notebook, notebooks, slug

DOCS = ("INSTALL", "TROUBLESHOOTING", "COMMANDS", "TESTED", "CONTRIBUTING")
NAMED = ("GLOSSARY.md", "labs/recipes/README.md", "labs/recipes/CLUSTER.md", "INSTRUCTOR.md")
NAMED += tuple(f"docs/{name}.md" for name in DOCS)
FRONT = "index.md"
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
LANGUAGES |= {".json": "json", ".jsonl": "json"}

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
TARGET = r"\((?P<target>[^)\s]+)(?P<title>\s+\"[^\"]*\")?\)"
LINK = re.compile(r"(?<!!)\[(?P<words>[^][]*(?:\[[^][]*\][^][]*)*)\]" + TARGET)
PICTURE = re.compile(r"!\[(?P<words>[^][]*)\]" + TARGET)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")
FIGURE = re.compile(r'src="data:image/(?P<kind>png|jpeg);base64,(?P<data>[^"]+)"')


class BadLink(ValueError):
    """A link in the repository leads to nothing."""


class Book:
    """Writes the pages of the repository at `root` into the folder `source`; `repository` is its address, or "".

    Figures go into `files`, which is copied to the site as it is.
    """

    def __init__(self, root: Path, source: Path, files: Path, repository: str = "") -> None:
        self.root, self.source, self.files, self.repository = root, source, files, repository.rstrip("/")
        self.notebooks = notebooks(root)
        self.written: set[Path] = set()
        self.markdown_linked: set[Path] = set()
        self.code_linked: dict[Path, set[Path]] = defaultdict(set)

    def write(self) -> None:
        """Write all pages. BadLink names the page and the link that leads nowhere."""
        for notebook in self.notebooks:
            self._write(notebook.path, json.dumps(self.notebook(notebook)))
        texts = {name: (self.root / name).read_text("utf-8") for name in NAMED}
        texts[FRONT] = (self.root / "README.md").read_text("utf-8")
        texts["GLOSSARY.md"] = glossary.page(texts["GLOSSARY.md"], self.notebooks)
        texts["map.md"] = notebook_map.page(self.notebooks)
        texts["claims.md"] = claim_table.page(self.root / "labs/claims/claims.toml", self.notebooks)
        for name, text in texts.items():
            self._write(Path(name), self.linked(text, Path(name)) + (self.contents() if name == FRONT else ""))
        while left := self.markdown_linked - self.written:  # a page may link to further ones
            for path in left:
                text = self.linked((self.root / path).read_text("utf-8"), path)
                self._write(path, f"---\norphan: true\n---\n\n{text}")
        for path, pages in self.code_linked.items():
            self._write(Path("code", f"{path}.md"), self.code_page(path, pages))

    def _write(self, path: Path, text: str) -> None:
        self.written.add(path)
        (self.source / path).parent.mkdir(parents=True, exist_ok=True)
        (self.source / path).write_text(text, "utf-8")

    # -- links

    def _path(self, address: str, page: Path) -> Path:
        """The file or folder that `page` calls by a relative address. BadLink if there is none."""
        here = self.root / ("README.md" if page == Path(FRONT) else page)
        path = Path(os.path.normpath(here.parent / unquote(address) if address else here))
        if not path.exists() or not path.is_relative_to(self.root):
            raise BadLink(f"{page}: the link {address!r} leads to nothing")
        return path.relative_to(self.root)

    def link(self, target: str, page: Path) -> str:
        """Where a link of `page` leads among the pages. "" if it names a folder or data, which have none."""
        if ELSEWHERE.match(target):
            return target
        address, _, fragment = target.partition("#")
        anchor = f"#{slug(unquote(fragment))}" if fragment else ""
        path = self._path(address, page)
        if (self.root / path).is_dir():
            path /= "README.md"
            if not (self.root / path).exists():
                return ""
        if path == Path("README.md"):
            path = Path(FRONT)
        elif path.suffix == ".md" and str(path) not in NAMED:
            self.markdown_linked.add(path)
        elif path.suffix not in (".md", ".ipynb"):
            if b"\0" in (self.root / path).read_bytes():
                return ""
            self.code_linked[path].add(page)
            path = Path("code", f"{path}.md")
        return anchor if path == page and anchor else os.path.relpath(path, page.parent) + anchor

    def linked(self, markdown: str, page: Path) -> str:
        """The Markdown of `page` with links that hold in the book. Code stays as it is."""

        def picture(found: re.Match[str]) -> str:
            if ELSEWHERE.match(found["target"]):  # nothing is loaded from elsewhere: a badge becomes its words
                return found["words"]
            self._copy_picture(found["target"], page)
            return found[0]

        def link(found: re.Match[str]) -> str:
            target = self.link(found["target"], page)
            return f"[{found['words']}]({target}{found['title'] or ''})" if target else found["words"]

        kept: list[str] = []  # code, which may stand in the words of a link, too

        def keep(found: re.Match[str]) -> str:
            kept.append(found[0])
            return f"\0{len(kept) - 1}\0"

        text = LINK.sub(link, PICTURE.sub(picture, CODE.sub(keep, markdown)))
        return re.sub(r"\0(\d+)\0", lambda mark: kept[int(mark[1])], text)

    def _copy_picture(self, target: str, page: Path) -> None:
        path = self._path(target, page)
        (self.source / path).parent.mkdir(parents=True, exist_ok=True)
        (self.source / path).write_bytes((self.root / path).read_bytes())

    def linked_html(self, markup: str, page: Path) -> str:
        """The HTML of an output with links that hold on the site."""

        def change(found: re.Match[str]) -> str:
            if ELSEWHERE.match(found[1]):
                return found[0]
            target = re.sub(r"\.(md|ipynb)(?=#|$)", ".html", self.link(html.unescape(found[1]), page))
            return f'href="{target or "#"}"'

        return re.sub(r'href="([^"#][^"]*)"', change, markup)

    # -- notebooks

    def notebook(self, notebook: Notebook) -> dict:
        """The notebook's content: its number in its title, links that hold, figures in files, a line about its run."""
        cells = []
        for cell in notebook.content["cells"]:
            source = "".join(cell["source"])
            cell = {**cell, "source": self.linked(source, notebook.path) if cell["cell_type"] == "markdown" else source}
            if "outputs" in cell:
                cell["outputs"] = [self._output(output, notebook.path) for output in cell["outputs"]]
            cells.append(cell)
        cells[0]["source"] = cells[0]["source"].replace("# ", f"# {notebook.number} ", 1)
        about = {"id": "about-this-run", "cell_type": "markdown", "metadata": {}, "source": about_run(notebook)}
        cells.insert(1, about)
        return {**notebook.content, "cells": cells}

    def _output(self, output: dict, page: Path) -> dict:
        data = {kind: "".join(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")}
        if "text/markdown" in data:
            data["text/markdown"] = self.linked(data["text/markdown"], page)
        if "text/html" in data:
            data["text/html"] = FIGURE.sub(self._figure, self.linked_html(data["text/html"], page))
        return {**output, "data": {**output["data"], **data}} if data else output

    def _figure(self, found: re.Match[str]) -> str:
        """Put a figure into a file: the browser loads it when it comes into view, and one that comes twice, once."""
        content = base64.b64decode(found["data"])
        name = f"{hashlib.sha256(content).hexdigest()[:16]}.{found['kind']}"
        (self.files / "figures").mkdir(parents=True, exist_ok=True)
        (self.files / "figures" / name).write_bytes(content)
        return f'loading="lazy" src="../figures/{name}"'

    # -- pages made here

    def contents(self) -> str:
        """What follows the front page's text: the order of all pages, for the sidebar and for previous and next."""
        chapters = [str(n.path.with_suffix("")) for n in self.notebooks]
        look_up = ["How the notebooks build on each other <map>", "Glossary <GLOSSARY>", "Claims on trial <claims>"]
        take = ["Recipes to take home <labs/recipes/README>", "Recipes on a cluster <labs/recipes/CLUSTER>"]
        use = [*(f"docs/{name}" for name in DOCS), "For instructors <INSTRUCTOR>"]
        lists = {"Notebooks": chapters, "Look up": look_up, "Take home": take, "Use": use}
        trees = [
            f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n" + "\n".join(pages) + "\n```"
            for name, pages in lists.items()
        ]
        return "\n\n" + ABOUT + "\n\n" + "\n\n".join(trees) + "\n"

    def code_page(self, path: Path, pages: set[Path]) -> str:
        """A file of the repository as a page, with the pages that link to it. It is not searched."""
        title = {n.path: f"{n.number} {n.short}" for n in self.notebooks}
        own = Path("code", path).parent
        links = [f"[{title.get(p, p.name)}]({os.path.relpath(p, own)})" for p in sorted(pages)]
        there = f" [In the repository]({self.repository}/blob/main/{path})." if self.repository else ""
        text = (self.root / path).read_text("utf-8").rstrip("\n")
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        block = f"{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}"
        return (
            f"---\norphan: true\nnosearch: true\n---\n\n# {path}\n\nLinked from {', '.join(links)}.{there}\n\n{block}\n"
        )


def about_run(notebook: Notebook) -> str:
    """The line under a notebook's introduction."""
    run = f" on {notebook.run}" if notebook.run else ""
    return (
        f"> *This page shows one run of the notebook{run}.* `make lab START={notebook.number}` opens your own copy, "
        "without outputs: predict, run, compare."
    )


ABOUT = """## This book

Every notebook is here as it ran once, with all its outputs; each page says on which machine and when. Your numbers
will differ: that is what the notebooks are for. [How they build on each other](map.md) · [Glossary](GLOSSARY.md) ·
[Claims on trial](claims.md)"""
