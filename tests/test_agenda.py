"""Minutes and agendas: counted from the notebooks, and the page that shows them is the one that is computed."""

import functools
import re

import nbformat
import pytest

from labs.classroom import agenda, instructor
from labs.classroom.plans import PLANS, Break
from labs.kit.errors import BadInput
from labs.kit.record import load

course = functools.cache(agenda.course)
NOTEBOOKS = sorted(agenda.NOTEBOOKS.glob("*.ipynb"))
HOURS = {"half": 4, "one": 8, "two": 8, "more": 8}


def test_the_page_is_computed():
    text = instructor.PAGE.read_text("utf-8")
    assert instructor.with_blocks(text, instructor.blocks()) == text, "run `python -m labs.classroom.instructor`"


def test_every_section_of_every_notebook_has_recorded_seconds():
    kept = {(r.case["notebook"], r.case["section"]) for r in load(agenda.RECORD)}
    sections = {(s.notebook, s.title) for s in course() if re.match(r"\d+\. ", s.title)}
    assert sections - kept == set(), (
        "run `make course`, then `python -m labs.classroom.instructor --keep build/minutes.json`"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_the_time_in_a_notebooks_head_is_that_of_its_sections(path):
    own = [s for s in course() if s.notebook == path.stem]
    minutes = sum(s.minutes("alone") for s in own if not s.exercises)
    head = nbformat.read(path, as_version=4).cells[0].source
    said, more = map(
        int, re.search(r"about (\d+)\s+minutes,\s+and\s+(\d+)\s+more\s+for\s+the\s+exercises", head).groups()
    )
    assert abs(said - minutes) <= 5, f"the head says {said} minutes, its sections take {minutes:.0f}"
    assert more == sum(s.exercise_min for s in own)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_exercise_says_how_long_it_takes(path):
    own = [s for s in course() if s.notebook == path.stem and re.match(r"\d\d\.\d", s.title)]
    assert own and all(5 <= s.exercise_min <= 45 for s in own), {s.title: s.exercise_min for s in own}


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_fits_into_its_day_and_teaches_nothing_twice(plan):
    found = course()
    text = agenda.agenda(plan, found, "09:00")
    ends = re.findall(r"^\| (\d\d):(\d\d) \| \| \| \*end\*", text, re.MULTILINE)
    assert len(ends) == len(PLANS[plan])
    assert all(9 + 2 < int(h) + int(m) / 60 <= 9 + HOURS[plan] for h, m in ends)
    taught = [f"{i[:2]}/{k}" for day in PLANS[plan] for i in day if isinstance(i, str) for k in i[3:].split(", ")]
    assert len(taught) == len(set(taught))


def test_a_longer_plan_teaches_all_of_a_shorter_one():
    taught = {
        plan: {f"{i[:2]}/{k}" for day in days for i in day if not isinstance(i, Break) for k in i[3:].split(", ")}
        for plan, days in PLANS.items()
    }
    assert taught["half"] <= taught["one"] <= taught["two"]


def test_minutes_are_people_and_machine():
    section = agenda.Section("03_x", "1. A", words=300, predictions=1, results=2, exercises=0, machine_s=60)
    assert section.minutes("alone") == pytest.approx(2 + 1 + 3 + 1)
    assert section.minutes("room") > section.minutes("alone") and section.key == "03/1"


def test_a_folded_table_takes_no_minutes(tmp_path):
    def shows(markup):
        return nbformat.v4.new_output("display_data", {"text/html": markup})

    table = "<table><tr><td>1</td></tr></table>"
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("a()", outputs=[shows(table)]),
            nbformat.v4.new_code_cell("b()", outputs=[shows(f"<details><summary>more</summary>{table}</details>")]),
        ]
    )
    nbformat.write(notebook, path := tmp_path / "03_x.ipynb")
    assert [s.results for s in agenda.sections(path, {})] == [1]


def test_bad_input_names_the_fix(tmp_path):
    with pytest.raises(BadInput, match="start must be a time such as 09:00, not '25:00'"):
        agenda.agenda("half", course(), "25:00")
    with pytest.raises(BadInput, match=r"there is no .*none\.json: `make course` writes"):
        agenda.seconds_of(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"01_timing": 3}')
    with pytest.raises(BadInput, match="does not hold seconds per section"):
        agenda.seconds_of(tmp_path / "bad.json")
    with pytest.raises(BadInput, match="has no line <!-- computed: x -->"):
        instructor.with_blocks("text", {"x": "y"})


@pytest.mark.parametrize(
    "text, first",
    [
        ("2 ranks: 1.95 x as fast. DDP: 2 x.", "2 ranks: 1.95 x as fast."),
        ("One sentence.", "One sentence."),
        ("Ends at 2.5 s. 3 more.", "Ends at 2.5 s."),
    ],
)
def test_first_sentence(text, first):
    assert instructor.first_sentence(text) == first
