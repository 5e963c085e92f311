"""Small files and names of others: notebooks, names of learners, patterns of exercises."""

import json
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from junk import RAW, damaged, with_junk

from labs.kit import fingerprint, room

# -- names of learners, patterns of exercises


@given(st.text() | st.text("./\\_\0 \n\udcffé\U0001f600~-", max_size=200) | st.text(min_size=70, max_size=99))
@example("é" * 79 + ".")
def test_any_text_is_the_name_of_a_folder(text):
    name = room.safe_name(text)
    assert 1 <= len(name.encode()) <= 80 and name.isprintable() and not set(name) & set("/\\: ")
    assert not name.startswith(".") and not name.endswith(".")
    assert room.safe_name(name) == name


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
