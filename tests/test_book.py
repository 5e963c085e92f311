"""The book, `make book`: links, pages and figures hold on the site, and nothing is loaded from elsewhere.

What the pages are made of is tried with small notebooks, without Sphinx. The site is built once and read file by file;
that takes an environment which `make book` has made, .venv-book, or Sphinx and its companions in this one.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import chromium
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "book"))

from pages import NAMED, Book  # noqa: E402
from reading import Notebook  # noqa: E402

PNG = "iVBORw0KGgo="


# -- what pages are made of


@pytest.fixture
def book(tmp_path):
    """A repository with a notebook, a recipe and a README, ready to be written."""
    root = tmp_path / "course"
    for folder in ("notebooks", "labs/claims", "labs/recipes"):
        (root / folder).mkdir(parents=True)
    (root / "README.md").write_text("# Course\n\n[fix](#fix-it)\n\n## Fix it\n\nSo.\n")
    (root / "GLOSSARY.md").write_text("# Glossary\n\n**rank** [03](notebooks/03_b.ipynb): A process.\n")
    (root / "labs/recipes/train.py").write_text("print('```')\n")
    (root / "labs/claims/claims.toml").write_text("claim = []\n[articles]\n")
    for name in NAMED[1:]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("# Page\n")
    figure = f'<img alt="Time" src="data:image/png;base64,{PNG}"><a href="../labs/recipes/train.py">x</a>'
    shown = new_output("display_data", data={"text/html": figure, "text/plain": "Time"})
    cells = [
        new_markdown_cell("# Split it: well"),
        new_markdown_cell("## 1. Who waits?\n\nA rank. [g](../GLOSSARY.md)"),
    ]
    cells += [new_code_cell("show()", outputs=[shown]), new_code_cell("show()", outputs=[shown])]
    (root / "notebooks/03_b.ipynb").write_text(json.dumps(new_notebook(cells=cells)))
    return Book(root, tmp_path / "source", tmp_path / "files")


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("[a](03_b.ipynb#1.-Who-waits%3F)", "[a](#1-who-waits)"),
        ("[a](../labs/recipes/train.py)", "[a](../code/labs/recipes/train.py.md)"),
        ("[`a`](../labs/recipes)", "[`a`](../labs/recipes/README.md)"),
        ("[a](../labs)", "a"),
        ("[a](../README.md#fix-it)", "[a](../index.md#fix-it)"),
        ("[a](https://x.org/a.md)", "[a](https://x.org/a.md)"),
        ("`[a](gone.py)`", "`[a](gone.py)`"),
        ("[![Run](https://x.org/run.svg)](https://x.org)", "[Run](https://x.org)"),
    ],
)
def test_links_hold_in_the_book(book, written, there):
    assert book.linked(written, Path("notebooks/03_b.ipynb")) == there


def test_all_pages_are_written_and_a_figure_that_comes_twice_is_one_file(book):
    book.write()
    pages = {str(p.relative_to(book.source)) for p in book.source.rglob("*.*")}
    assert {
        "index.md",
        "docs/INSTALL.md",
        "map.md",
        "claims.md",
        "notebooks/03_b.ipynb",
        "code/labs/recipes/train.py.md",
    } <= pages
    assert "[fix](#fix-it)" in (book.source / "index.md").read_text()
    assert "````python\nprint('```')\n````" in (book.source / "code/labs/recipes/train.py.md").read_text()
    assert "[1. Who waits?](notebooks/03_b.ipynb#1-who-waits)" in (book.source / "GLOSSARY.md").read_text()
    cells = json.loads((book.source / "notebooks/03_b.ipynb").read_text())["cells"]
    assert "make lab START=03" in cells[1]["source"]
    markup = cells[-1]["outputs"][0]["data"]["text/html"]
    (figure,) = (book.files / "figures").iterdir()
    assert f'src="../figures/{figure.name}"' in markup and 'href="../code/labs/recipes/train.py.html"' in markup


def notebook(number, needs):
    cells = [new_markdown_cell(f"# Title {number}"), new_markdown_cell(f"## You need\n\n{needs}")]
    return Notebook(Path(f"notebooks/{number}_x.ipynb"), new_notebook(cells=cells))


def test_the_packages_of_the_book_are_pinned_within_their_bounds():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    lines = [line for line in (ROOT / "book/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert "pip" in pins and "torch" not in pins
    for requirement in map(Requirement, groups["book"]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


# -- the site


class Page(HTMLParser):
    """What a page of the site links to, loads and shows."""

    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links, self.loads, self.headings, self.pictures = path, set(), [], [], [], []
        self.next = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        self.ids |= {a[k] for k in ("id", "name") if a.get(k)}
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
            if "next-page" in (a.get("class") or ""):
                self.next = a["href"]
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed") and a.get("src"):
            self.loads.append(a["src"])
        if tag == "link" and a.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loads.append(a["href"])
        if tag == "img":
            self.pictures.append(a)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    handle_startendtag = handle_starttag


def python_with_sphinx():
    """A Python that can build the book, None if there is none."""
    own = ROOT / ".venv-book" / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if all(map(importlib.util.find_spec, ("sphinx", "myst_nb", "furo"))) else None


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{path: page} of the whole site, built with warnings as errors."""
    python = python_with_sphinx()
    if python is None:
        pytest.skip("Sphinx is not installed: `make book` makes .venv-book")
    out = tmp_path_factory.mktemp("book") / "site"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS", "BOOK_REPOSITORY")}
    command = [python, ROOT / "book", "--out", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path) for path in out.rglob("*.html")}


built = pytest.mark.long  # the fixture takes half a minute
SEARCHES = ("search.html", "genindex.html")


def content(site):
    """The pages that somebody wrote."""
    return {path: page for path, page in site.items() if path.name not in SEARCHES}


def top(site):
    return min(site, key=lambda path: len(path.parts)).parent


@built
def test_no_link_is_broken(site):
    broken = []
    for path, page in site.items():
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https", "data", "mailto"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = site[file].ids if file in site else None
            if not file.is_file() or (parts.fragment and known is not None and unquote(parts.fragment) not in known):
                broken.append(f"{path.name}: {target}")
    assert broken == []


@built
def test_nothing_is_loaded_from_elsewhere(site):
    loads = [f"{path.name}: {t}" for path, page in site.items() for t in page.loads if re.match("(https?:)?//", t)]
    styles = top(site).rglob("*.css")
    loads += [
        f"{p.name}: {u}"
        for p in styles
        for u in re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^)'\"]+)", p.read_text())
    ]
    assert loads == []


# -- in a browser


@pytest.fixture(scope="module")
def browser():
    if not chromium.executable():
        pytest.skip(chromium.MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


@built
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_scrolls_sideways_on_a_phone_or_asks_the_network(site, browser, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    tab, wrong = context.new_page(), []
    tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))
    tab.on("request", lambda request: wrong.append(request.url) if request.url.startswith("http") else None)
    for path in (p for p in content(site) if "code" not in p.relative_to(top(site)).parts):
        tab.goto(path.as_uri())
        width = tab.evaluate("document.documentElement.scrollWidth")
        wrong += [f"{path.name} is {width} pixels wide"] if width > 390 else []
    context.close()
    assert wrong == []
