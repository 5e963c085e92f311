"""Whatever is in a shared folder: it costs nobody else a row, is one line if unreadable, and never HTML."""

import contextlib
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st
from junk import RAW, damaged, values, with_junk
from test_classroom import MACHINES, ddp_records, outcome, pair

from labs.classroom.__main__ import change_revealed
from labs.classroom.room import collect, page
from labs.classroom.room.collect import read_room
from labs.classroom.room.figures import Drawn, machines_figure, question_figure
from labs.classroom.room.machines import comparisons, tables
from labs.classroom.room.page import render
from labs.classroom.room.questions import questions
from labs.kit import room
from labs.kit.errors import BadInput

# -- a room of two, of whom one has a damaged file

HEADER = {"provenance": MACHINES[1]}
REPORT = {
    "schema": 1,
    "verdict": "NO-GO",
    "reasons": ["shared memory: 64 MB"],
    "warnings": 1,
    "course": "a" * 12,
    "machine": MACHINES[0],
    "versions": {"python": "3.11.7"},
    "utc": "2026-11-21T09:00:00",
}
PAIRS = [pair(2.0, 1.5), pair(3.0, None, "2026-11-21T11:00:00"), pair(1, 2, what="steps")]
OUTCOMES = [outcome("03.1", "not yet", "the shards overlap"), outcome("03.1", "passed"), outcome("04.3", "to do")]
FILES = {
    "predictions-1.jsonl": [HEADER, *PAIRS],
    "outcomes-1.jsonl": [HEADER, *OUTCOMES],
    "preflight.json": [REPORT],
    "data_parallel-1.jsonl": [json.loads(x) for x in ddp_records(1.5, MACHINES[0]).lines()],
}
LINES = {name: [json.dumps(row).encode() for row in rows] for name, rows in FILES.items()}
ROWS = {"predictions-1.jsonl": "predictions", "outcomes-1.jsonl": "outcomes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    for name, lines in LINES.items():
        write(folder / "Ada" / name, b"\n".join(lines))
    (folder / "Mallory").mkdir()
    return folder


@pytest.fixture(scope="module")
def ada(folder):
    """What is read of Ada while nobody else is there."""
    (learner, _), problems = read(folder)
    assert not problems and learner.preflight and len(learner.predictions) == len(learner.outcomes) == 3
    assert len(learner.runs) == 1
    return repr(learner)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    collect._load.cache_clear()  # the tests' files follow each other faster than a file system's clock ticks


def read(folder: Path) -> tuple[list[collect.Learner], list[tuple[str, str]]]:
    found = read_room(folder)
    return found.learners, found.problems


@pytest.fixture
def no_drawing(monkeypatch):
    """Pages without figures, which have a test of their own."""
    for name in ("question_figure", "machines_figure", "progress_figure"):
        monkeypatch.setattr(page, name, lambda *_: Drawn("data:,", "a figure"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(FILES)), st.data())
def test_a_damaged_file_costs_its_own_lines_and_nobody_elses(folder, ada, no_drawing, name, data):
    content = damaged(data.draw, LINES[name])
    for who in ("Mallory", "Oscar"):
        shutil.rmtree(folder / who, ignore_errors=True)
        write(folder / who / name, content)
    found = read_room(folder)
    first, mallory, _ = found.learners
    assert repr(first) == ada
    said = [text for who, text in found.problems if who == "Mallory"]
    for text in said:
        assert text.startswith(name) and len(text) < 300 and text.isprintable()
    if topic := ROWS.get(name):
        _every_line_is_read_or_named(name, content.splitlines(), getattr(mallory, topic), said)
    else:
        assert bool(said) != bool(mallory.preflight or mallory.runs)
    assert_harmless(render(found))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_junk_in_any_field_costs_no_other(tmp_path, name):
    header, first, *_ = FILES[name]
    junk = [with_junk(first, field, raw) for field in first for raw in RAW]
    last = first | {"utc": "2026-11-22"}
    write(tmp_path / "Mallory" / name, b"\n".join([json.dumps(header).encode(), *junk, json.dumps(last).encode()]))
    (mallory,), problems = read(tmp_path)
    rows = getattr(mallory, ROWS[name])
    assert {**last, "machine": MACHINES[1]} in rows
    assert len(problems) + len(rows) == len(junk) + 1 and len(problems) > 0.4 * len(junk)


def test_junk_in_any_field_of_a_preflight_is_no_text_of_the_page(tmp_path):
    for k, raw in enumerate(RAW):
        machine = f'{{"cpu": {raw}, "gpus": [{raw}, {{"name": {raw}}}], "cores": {raw}}}'
        fields = {
            **dict.fromkeys(["course", "utc", "warnings"], raw),
            "reasons": f"[{raw}]",
            "machine": machine,
            "versions": f'{{"torch": {raw}}}',
        }
        for n, (name, junk) in enumerate([*fields.items(), ("machine", f'{{"cpu": {raw}}}')]):
            write(tmp_path / f"{k}-{n}" / "preflight.json", with_junk(REPORT, name, junk))
    html = render(read_room(tmp_path))
    assert_harmless(html)
    assert "script&gt;" in html and "\u202e" not in html and len(html) < 500_000


def _every_line_is_read_or_named(name, lines, rows, said):
    found = [{k: v for k, v in row.items() if k != "machine"} for row in rows]
    assert all(json.loads(x) in found for x in lines if x in LINES[name][1:]), "a whole line was lost with another"
    named = {int(n) for text in said for n in re.findall(rf"^{name}, line (\d+): ", text)}
    headers = [n for n, line in enumerate(lines, 1) if b'{"provenance": {' in line and n not in named]
    assert len(found) + len(named) + len(headers) == len(lines)


class Tags(HTMLParser):
    """The tags of a page, and the names of their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found |= {tag, *(name for name, _ in attrs)}


def assert_harmless(html: str) -> None:
    assert Tags(html).found <= set(re.findall(r"[a-z][a-z0-9-]*", page.PAGE)) - {"script"}
    html.encode()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("<>&\"'$\n\r\x1b\u202e\udcff\\a.{}", min_size=1, max_size=30), min_size=2, max_size=2))
@example(["<script>alert(1)<", "<img src=x onerror=y>"])
def test_names_are_text_whatever_they_are(folder, ada, no_drawing, names):
    here = folder / "Mallory"
    try:
        assume(all(name.strip(".") and os.fsencode(name) for name in names))
    except UnicodeEncodeError:
        reject()  # no file can have this name in this locale
    shutil.rmtree(folder / "Oscar", ignore_errors=True)
    shutil.rmtree(here, ignore_errors=True)
    write(here / names[0], b"x")
    row = outcome("03.1", "not yet", names[0]) | {"exercise": names[1]}
    write(here / "outcomes-1.jsonl", json.dumps(row).encode())
    write(
        folder / names[1] / "predictions-1.jsonl", json.dumps(pair(1, 2, what=names[0]) | {"unit": names[1]}).encode()
    )
    try:
        found = read_room(folder)
        assert [repr(x) for x in found.learners if x.name == "Ada"] == [ada]
        assert all(text.isprintable() and who.isprintable() for who, text in found.problems)
        assert bool([text for who, text in found.problems if who == "Mallory"]) != names[0].startswith(".")
        html = render(found)
        assert_harmless(html)
    finally:
        shutil.rmtree(folder / names[1])


# -- figures

number = st.sampled_from([0.0, 1, -1.0, 1.5, 5e-324, 1e-300, 9e99, -9e99, 10**99]) | st.floats(-1e99, 1e99)
word = st.sampled_from(
    ["w", "", "$", "$\\foo$", "a^{b}_", "<b>", "%s {x}", "\u202e", "\0", "\ud800", "x" * 3000, "CPU"]
)
rows = st.fixed_dictionaries(
    {
        "what": word,
        "unit": word,
        "kind": st.sampled_from(["measured", "modelled", "x" * 3000]),
        "utc": st.just(""),
        **{name: st.none() | number for name in ("predicted", "value", "low", "high")},
    }
)


@pytest.mark.filterwarnings("error::UserWarning")  # glyphs that no font has, labels that leave no room
@settings(max_examples=12)
@given(st.lists(rows, min_size=1, max_size=3), word)
@example([pair(1e308, 1e308)] * 2, "CPU")
@example([pair(1, 1, what="") | {"unit": ""}, pair(1, 1, what="$\\foo$"), pair(1, 1) | {"kind": "x" * 3000}], "$")
def test_any_numbers_and_words_that_are_read_can_be_drawn(tmp_path_factory, some, cpu):
    folder = tmp_path_factory.mktemp("room")
    lines = [
        json.dumps(row) for row in [{"provenance": {"cpu": cpu}}, *({**pair(1, 1, what=r["what"]), **r} for r in some)]
    ]
    for who in ("a", "b"):
        write(folder / who / "predictions-1.jsonl", "\n".join(lines).encode())
    for question in questions(read_room(folder).learners):
        assert len(question_figure(question, "room").src) > 1000


@pytest.mark.filterwarnings("error::UserWarning")
@settings(max_examples=12)
@given(st.tuples(*[number.filter(bool) | st.sampled_from([1e308, 10**400])] * 2), word)
@example((1, 10**308), "$\\foo$")
@example((5e-300, 1e200), "CPU")
def test_any_machines_can_be_compared(tmp_path_factory, numbers, cpu):
    folder, batches = tmp_path_factory.mktemp("room"), iter(numbers)
    rows = [json.loads(x) for x in ddp_records(1.5, MACHINES[0]).lines()]
    for row in rows:
        if row.get("case", {}).get("mode"):
            row["case"]["batch_per_rank"] = next(batches)
        if "provenance" in row:
            row["provenance"]["cpu"] = cpu
    for who in ("a", "b"):
        write(folder / who / "data_parallel-1.jsonl", b"\n".join(json.dumps(row).encode() for row in rows))
    learners = read_room(folder).learners
    for found in comparisons(learners):
        assert all(math.isfinite(row.estimate.value) for row in found.rows)
        assert len(machines_figure(found, "room").src) > 1000
    tables(learners)


# -- what the instructor has revealed


@st.composite
def lists(draw) -> bytes:
    """Of revealed solutions."""
    raw = draw(st.sampled_from(RAW) | values.map(json.dumps))
    line = draw(st.sampled_from([with_junk({"revealed": 1}, "revealed", raw), b'{"revealed": ["03.*"]}']))
    return draw(st.sampled_from([raw.encode(), damaged(draw, [line])]))


@settings(max_examples=40)
@given(lists())
@example(b"[" * 60_000)
def test_a_list_of_revealed_solutions_is_a_list_or_one_line(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("room")
    (folder / "revealed.json").write_bytes(content)
    found = read_room(folder)
    assert bool(found.problems) or isinstance(room.revealed_patterns(folder), list)
    assert all(text.startswith("revealed.json: ") and text.isprintable() for _, text in found.problems)
    assert not (found.problems and found.revealed)
    assert_harmless(render(found))
    with contextlib.suppress(BadInput):
        change_revealed(folder, ("03.1",), ())
        assert room.matches("03.1", room.revealed_patterns(folder))
