"""The README's paths through the course: every section that they name is there."""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
SECTION = re.search(r"^## Paths\n(.*?)^## ", (ROOT / "README.md").read_text("utf-8"), re.DOTALL | re.MULTILINE)[1]
PATHS = re.findall(r"^\* \*\*(.+?)\*\*: (.+?)(?=^\* |\Z)", SECTION, re.DOTALL | re.MULTILINE)
LISTED = [(name, text) for name, text in PATHS if not text.startswith("every notebook")]


def headings(notebook: str) -> dict[str, str]:
    """{number of a section or exercise: its title}."""
    cells = nbformat.read(ROOT / "notebooks" / f"{notebook}.ipynb", as_version=4).cells
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    return dict(re.findall(r"^###? ([\d.]*\d)\.? (.+)$", text, re.MULTILINE))


def test_there_are_paths():
    assert len(LISTED) >= 5


@pytest.mark.parametrize(("name", "text"), LISTED, ids=[name for name, _ in LISTED])
def test_a_path_leads_to_sections_that_exist(name, text):
    for part in re.sub(r"\s+", " ", text).strip().split(" · "):
        number, stem, rest = re.fullmatch(r"\[(\d\d)\]\(notebooks/(\w+)\.ipynb\) (.+)", part).groups()
        assert stem.startswith(number)
        known = headings(stem)
        for section in re.split(r"; |, (?=[\d.]+(?:,|$))", rest):
            key, _, title = section.partition(" ")
            assert known[key.removesuffix(".")].replace("`", "").startswith(title), section
