"""GLOSSARY.md: sorted, linked to sections that hold each term, and complete for what the notebooks define."""

import itertools
import re
from pathlib import Path

import nbformat
import pytest
from notebook_rules import markdown, section

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^\*\*(?P<term>[^*]+)\*\* (?P<links>(?:\[\d\d, [^]]+\]\([^)]+\)(?:, )?)+): (?P<text>.+)$")
LINK = re.compile(r"\[(?P<number>\d\d), (?P<section>[^]]+)\]\((?P<path>[^)]+)\)")
HEADING = re.compile(r"^## (?:(?P<number>\d+)\.|(?P<name>.+)$)", re.MULTILINE)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TEXTS = {p.name: markdown(nbformat.read(p, as_version=4)) for p in NOTEBOOKS}


def sections(path: Path) -> dict[str, str]:
    """{"section 2" or a heading without a number: what a reader sees under it}: cells and the text of their outputs."""
    found, name = {}, "introduction"
    for cell in nbformat.read(path, as_version=4).cells:
        outputs = cell.get("outputs", [])
        said = [o.get("text", "") + "".join(o.get("data", {}).get(k, "") for k in KINDS) for o in outputs]
        parts = HEADING.split(cell.source) if cell.cell_type == "markdown" else [cell.source]
        found[name] = "\n".join([found.get(name, ""), _plain(parts[0]), *said])
        for number, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            name = f"section {number}" if number else title
            found[name] = found.get(name, "") + _plain(text)
    return found


def _plain(text: str) -> str:
    """`text` without marks of emphasis."""
    return re.sub(r"[*`]", "", text)


KINDS = ("text/plain", "text/markdown")
SEEN = {p.name: sections(p) for p in NOTEBOOKS}


def entries(page: str) -> dict[str, tuple[list[re.Match], str]]:
    """{term: (its links, everything after them)} of a glossary page."""
    found = [m for line in page.splitlines() if (m := ENTRY.match(line))]
    return {m["term"]: (list(LINK.finditer(m["links"])), m["text"]) for m in found}


def occurs(term: str, text: str) -> bool:
    """Whether `text` has the term, whatever its capitals, hyphens, line breaks and simple endings."""
    stem = term.removesuffix("ing").removesuffix("e").removesuffix("y")
    pattern = re.sub(r"[-_\\ ]+", r"[-_\\s]*", re.escape(stem))
    return re.search(rf"(?<![A-Za-z]){pattern}", text, re.IGNORECASE) is not None


def problems(page: str, texts: dict[str, dict[str, str]]) -> list[str]:
    """What is wrong with a glossary page beside notebooks {file name: {section: text}}."""
    found = entries(page)
    lines = [line for line in page.splitlines() if line.startswith("**")]
    wrong = [f"not an entry: {line[:60]}" for line in lines if not ENTRY.match(line)]
    terms = [m["term"] for line in lines if (m := ENTRY.match(line))]
    wrong += [f"{b!r} stands after {a!r}" for a, b in itertools.pairwise(terms) if a.casefold() >= b.casefold()]
    for term, (links, text) in found.items():
        for link in links:
            name = Path(link["path"]).name
            if name not in texts or not name.startswith(link["number"]) or link["section"] not in texts[name]:
                wrong.append(f"{term}: broken link {link[0]}")
            elif not occurs(term, texts[name][link["section"]]):
                wrong.append(f"{term}: not in {link['section']} of {name}")
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
    assert 150 <= len(entries((ROOT / "GLOSSARY.md").read_text())) <= 200


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_notebook_defines_is_in_the_glossary(name):
    known = {term.casefold() for term in entries((ROOT / "GLOSSARY.md").read_text())}
    terms = defined_terms(TEXTS[name])
    assert terms, "a notebook says under 'You need' which words it takes for granted"
    assert [t for t in terms if t.casefold().rstrip("s") not in known and t.casefold() not in known] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_notebook_links_to_the_glossary(name):
    assert "](../GLOSSARY.md)" in TEXTS[name]


BUBBLE = "**bubble** [06, section 2](notebooks/06_b.ipynb): Waiting. *Symbol, unit:* $p$."
GOOD = f"{BUBBLE}\n\n**rank** [00, You need](notebooks/00_a.ipynb): A process.\n"
FEW = {"00_a.ipynb": {"You need": "A rank is one."}, "06_b.ipynb": {"section 1": "", "section 2": "The bubble grows."}}


def test_a_good_page_has_no_problem():
    assert problems(GOOD, FEW) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("**bubble**", "**stage**", "stands after"),
        ("**rank**", "**bubble**", "stands after"),
        ("**bubble**", "**bucket**", "not in"),
        ("section 2", "section 1", "not in"),
        ("section 2", "section 3", "broken link"),
        ("06_b.ipynb", "06_gone.ipynb", "broken link"),
        ("[06,", "[05,", "broken link"),
        ("): A process.", ") A process.", "not an entry"),
        ("A process.", "A process. It has one. And two. And three.", "sentences"),
    ],
)
def test_problems_are_found(old, new, said):
    assert any(said in p for p in problems(GOOD.replace(old, new), FEW))


def test_a_term_is_found_in_its_forms_and_not_inside_words():
    assert occurs("copy-on-write", "copy on\nwrite") and occurs("synchronise", "Synchronising gradients")
    assert not occurs("rank", "a frank word")
