"""GLOSSARY.md: sorted, linked to notebooks that hold each term, and complete for what the notebooks define."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest
from notebook_rules import markdown, section

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^\*\*(?P<term>[^*]+)\*\* (?P<links>(?:\[\d\d\]\([^)]+\)(?:, )?)+): (?P<text>.+)$")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = {p.name: markdown(nbformat.read(p, as_version=4)) for p in NOTEBOOKS}


def all_text(path: Path) -> str:
    """What a reader of the notebook sees: cells and the text of their outputs, without marks of emphasis."""
    nb = nbformat.read(path, as_version=4)
    outputs = [o for c in nb.cells for o in c.get("outputs", [])]
    said = [o.get("text", "") + "".join(o.get("data", {}).get(k, "") for k in KINDS) for o in outputs]
    return "\n".join([re.sub(r"[*`]", "", c.source) for c in nb.cells] + said)


KINDS = ("text/plain", "text/markdown")
SEEN = {p.name: all_text(p) for p in NOTEBOOKS}


def entries(page: str) -> dict[str, tuple[list[str], str]]:
    """{term: (notebooks it links to, everything after the links)} of a glossary page."""
    found = [m for line in page.splitlines() if (m := ENTRY.match(line))]
    return {m["term"]: (re.findall(r"\(([^)]+)\)", m["links"]), m["text"]) for m in found}


def occurs(term: str, text: str) -> bool:
    """Whether `text` has the term, whatever its capitals, hyphens, line breaks and simple endings."""
    stem = term.removesuffix("ing").removesuffix("e").removesuffix("y")
    pattern = re.sub(r"[-_\\ ]+", r"[-_\\s]*", re.escape(stem))
    return re.search(rf"(?<![A-Za-z]){pattern}", text, re.IGNORECASE) is not None


def problems(page: str, texts: dict[str, str]) -> list[str]:
    """What is wrong with a glossary page beside notebooks {file name: text}."""
    found = entries(page)
    terms = list(found)
    wrong = [f"{b!r} stands after {a!r}" for a, b in itertools.pairwise(terms) if a.casefold() > b.casefold()]
    lines = [line for line in page.splitlines() if line.startswith("**")]
    wrong += [f"not an entry: {line[:60]}" for line in lines if not ENTRY.match(line)]
    for term, (links, text) in found.items():
        missing = [link for link in links if Path(link).name not in texts]
        wrong += [f"{term}: broken link {link}" for link in missing]
        there = [link for link in links if link not in missing]
        wrong += [f"{term}: not in {link}" for link in there if not occurs(term, texts[Path(link).name])]
        sentences = re.split(r" \*(?:Symbol|Also)\b", text)[0].rstrip(".").split(". ")
        wrong += [f"{term}: {len(sentences)} sentences"] if not 1 <= len(sentences) <= 3 else []
    return wrong


def defined_terms(text: str) -> list[str]:
    """What a notebook defines under "You need": its words in italics that "is" or "are" follows."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    needed = section(nb, "You need") or ""
    return re.findall(r"(?<![*\w])\*([A-Za-z][^*\n]*)\*(?!\*)(?=[^.;:]*?\b(?:is|are|says|always)\b)", needed)


def test_glossary_is_in_order_and_every_term_is_in_the_notebook_it_links_to():
    assert problems((ROOT / "GLOSSARY.md").read_text(), SEEN) == []


def test_glossary_has_the_fields_terms():
    assert 70 <= len(entries((ROOT / "GLOSSARY.md").read_text())) <= 150


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_notebook_defines_is_in_the_glossary(name):
    known = {term.casefold() for term in entries((ROOT / "GLOSSARY.md").read_text())}
    terms = defined_terms(TEXTS[name])
    assert terms, "a notebook says under 'You need' which words it takes for granted"
    assert [t for t in terms if t.casefold().rstrip("s") not in known and t.casefold() not in known] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_notebook_links_to_the_glossary(name):
    assert "](../GLOSSARY.md)" in TEXTS[name]


BUBBLE = "**bubble** [06](notebooks/b.ipynb): Waiting. *Symbol, unit:* $p$."
GOOD = f"{BUBBLE}\n\n**rank** [00](notebooks/a.ipynb): A process.\n"
FEW = {"a.ipynb": "A rank is one.", "b.ipynb": "The *bubble* grows."}


def test_a_good_page_has_no_problem():
    assert problems(GOOD, FEW) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("**bubble**", "**stage**", "stands after"),
        ("**bubble**", "**bucket**", "not in"),
        ("b.ipynb", "gone.ipynb", "broken link"),
        ("): A process.", ") A process.", "not an entry"),
        ("A process.", "A process. It has one. And two. And three.", "sentences"),
    ],
)
def test_problems_are_found(old, new, said):
    assert any(said in p for p in problems(GOOD.replace(old, new), FEW))


def test_a_term_is_found_in_its_forms_and_not_inside_words():
    assert occurs("copy-on-write", "copy on\nwrite") and occurs("synchronise", "Synchronising gradients")
    assert not occurs("rank", "a frank word")
