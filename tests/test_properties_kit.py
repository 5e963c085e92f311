"""Small files and names of others: tickets of the queue, notebooks, names of learners, patterns of exercises."""

import fcntl
import json
import os
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from junk import RAW, damaged, with_junk

from labs.kit import fingerprint, launch_queue, room

# -- names of learners, patterns of exercises


@given(st.text() | st.text("./\\_\0 \n\udcffé\U0001f600~-", max_size=200) | st.text(min_size=70, max_size=99))
@example("é" * 79 + ".")
def test_any_text_is_the_name_of_a_folder(text):
    name = room.safe_name(text)
    assert 1 <= len(name.encode()) <= 80 and name.isprintable() and not set(name) & set("/\\: ")
    assert not name.startswith(".") and not name.endswith(".")
    assert room.safe_name(name) == name


# -- tickets of the queue

TICKET = {
    "name": "anna",
    "what": "data_parallel",
    "on": "2 cores",
    "claims": ["machine"],
    "pid": os.getpid(),
    "pids": launch_queue._pids(),
}


CONTENTS = [
    *(with_junk(TICKET, name, raw) for name in TICKET for raw in [*RAW, "-1", "99999999999"]),
    *(raw.encode() for raw in RAW),
    b"",
    b"\xff",
]


@pytest.mark.parametrize("state", ["waiting", "running"])
@pytest.mark.parametrize("alive", [True, False])
def test_whatever_a_ticket_holds_its_lock_decides(tmp_path, alive, state):
    whole, other = (tmp_path / f"{state}-{launch_queue.machine()}-{k:020d}-1.json" for k in (1, 2))
    whole.write_text(json.dumps(TICKET))
    with whole.open() as one:
        fcntl.flock(one, fcntl.LOCK_EX)
        for content in CONTENTS:
            other.write_bytes(content)
            with other.open() as two:
                fcntl.flock(two, fcntl.LOCK_EX if alive else fcntl.LOCK_UN)
                found = launch_queue.living_tickets(tmp_path)
            assert other.exists() == alive and whole.exists()
            assert [t.place[0] for t in found] in ([[1], [1, 2]] if alive else [[1]])
            assert "anna: data_parallel on 2 cores" in str(found[0])
            said = launch_queue.tell(found[::-1])
            assert said.startswith(f"waiting: {len(found)} launch") and said.isprintable() and len(said) < 600


# -- notebooks

CELLS = [
    {"cell_type": "code", "source": ["1 + 1\n", "2"], "metadata": {"tags": ["a"]}},
    {"cell_type": "markdown", "source": "# A", "metadata": {}},
]


@settings(max_examples=100)
@given(st.data())
def test_any_file_is_a_notebook_with_its_number_or_is_none(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "00_a.ipynb"
    raw = data.draw(st.sampled_from(RAW))
    k, name = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["cell_type", "source", "metadata", "nothing"]))
    cells = [with_junk(c, name, raw) if i == k else json.dumps(c).encode() for i, c in enumerate(CELLS)]
    lines = [b'{"cells": [', cells[0] + b",", cells[1], b"]}"]
    path.write_bytes(damaged(data.draw, lines) if data.draw(st.booleans()) else b"\n".join(lines))
    try:
        found = fingerprint.notebook(path)
    except ValueError as e:
        assert str(e) == f"{path} is not a notebook"
        return
    assert re.fullmatch("[0-9a-f]{12}", found)
    assert (found == WHOLE) == (json.loads(path.read_bytes())["cells"] == CELLS)


WHOLE = fingerprint._hash([json.dumps([["code", "1 + 1\n2", ["a"]], ["markdown", "# A", []]])])


@given(st.lists(st.text(".*?[!]-0134all", max_size=8) | st.text(max_size=4), max_size=3))
@example(["[", "[!", "*" * 3000, "[z-a]"])
@example(["all"])
def test_any_patterns_match_or_do_not(patterns):
    found = room.matches("03.1", patterns)
    assert found == any(room.matches("03.1", [p]) for p in patterns)
    plain = [p for p in patterns if not set(p) & set("*?[")]
    assert not (plain == patterns and found != bool({"all", "03.1"} & set(plain)))
