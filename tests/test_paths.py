"""The README's paths through the course: every section that they name is there, and their minutes are the agenda's."""

import re
from pathlib import Path

import pytest

from labs.classroom import agenda

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
SECTION = re.search(r"^## Paths\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
PATHS = re.findall(r"^\* \*\*(.+?)\*\*(?: \((\d+) minutes\))?: (.+?)(?=^\* |\Z)", SECTION, re.DOTALL | re.MULTILINE)
KNOWN = {s.key: s for s in agenda.course()}
ASKED = {
    "I have an hour": 60,
    "I have a day": 6 * 60,
    "I have two days": 12 * 60,
    "My GPU is idle 60 % of the time": 0,
    "It does not fit": 0,
    "Two GPUs are not faster": 0,
    "It hangs": 0,
    "I read an article and doubt it": 0,
    "My own script": 0,
}
"""Each path, and the most minutes that it may take; 0 where the reader has a trouble and no clock."""


def sections(text: str) -> list[agenda.Section]:
    """The sections behind "[03](notebooks/03_x.ipynb) 1. Title; 2. Title · [04](...) 1, 2". KeyError: there is none."""
    found = []
    for part in re.sub(r"\s+", " ", text).strip().split(" · "):
        number, stem, rest = re.fullmatch(r"\[(\d\d)\]\(notebooks/(\w+)\.ipynb\) (.+)", part).groups()
        assert stem.startswith(number)
        for name in re.split(r"; |, (?=[\d.]+(?:,|$))", rest):
            key, _, title = name.partition(" ")
            section = KNOWN[f"{number}/{key.removesuffix('.') if title else key}"]
            assert section.notebook == stem and title in ("", section.title.partition(" ")[2].replace("`", ""))
            found.append(section)
    return found


def test_there_is_a_path_for_each_reader():
    assert [name for name, _, _ in PATHS] == list(ASKED)


@pytest.mark.parametrize(("name", "minutes", "text"), PATHS, ids=[name for name, _, _ in PATHS])
def test_a_path_leads_to_sections_that_exist_in_the_minutes_that_it_says(name, minutes, text):
    if name == "I have two days":
        assert text.startswith("every notebook")
        found = [s for s in KNOWN.values() if not s.exercises]
    else:
        listed = sections(text)
        assert len(listed) == len({s.key for s in listed}) >= 3
        heads = {f"{s.notebook[:2]}/Introduction" for s in listed}
        found = [*listed, *(KNOWN[key] for key in heads)]
    assert bool(minutes) == bool(ASKED[name])
    if minutes:
        took = sum(s.minutes("alone") for s in found)
        assert abs(int(minutes) - took) <= 0.05 * took and took <= ASKED[name], f"{name}: {took:.0f} minutes"
