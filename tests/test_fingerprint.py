"""Committed outputs come from the committed cells and code; a version of the course is the same everywhere."""

import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labs.kit import fingerprint, rerun

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CODE = '''"""Doc."""
import math  # why


def area(r):
    """m^2"""
    text = "# no comment"
    return math.pi * r**2, text
'''


def test_outputs_come_from_these_cells_and_this_code():
    why = {path.name: said for path in NOTEBOOKS if (said := rerun.stale(path))}
    assert not why, "`make notebooks` runs them again"


def test_what_changes_no_output_does_not_count():
    edits = [("  # why", ""), ('"""m^2"""', '"""two\n    lines"""'), ("\n\n\n", "\n"), ("\n", "\r\n")]
    for edit in edits:
        assert fingerprint.without_comments(CODE.replace(*edit)) == fingerprint.without_comments(CODE)


LOOP = "for n in range(3):\n    total += n**2\n    print('# squares')\n"


def test_what_changes_an_output_counts():
    for edit in (("n**2", "n**3"), ("# squares", "# cubes"), ("    print", "print")):
        assert fingerprint.without_comments(LOOP.replace(*edit)) != fingerprint.without_comments(LOOP)


def test_code_behind_a_notebook_is_what_it_imports_and_launches_and_no_more():
    found = fingerprint.modules_behind(ROOT / "notebooks" / "03_dataparallel_vs_ddp.ipynb")
    assert {
        "labs.data_parallel",
        "labs.exercises.nb03",
        "labs.claims.nb03",
        "labs.kit.measure",
        "labs.common.models",
    } <= found
    assert not {m for m in found if "pipeline" in m or "nb04" in m or m.endswith("course")}


def test_all_that_a_launch_loads_is_code_behind_its_notebook():
    """Imports that syntax does not show would escape the fingerprint."""
    path = ROOT / "notebooks" / "06_model_parallelism.ipynb"
    found = fingerprint.modules_behind(path)
    load = (
        f"import sys\nfor m in {sorted(found)!r}: __import__(m)\nprint(*[m for m in sys.modules if m[:5] == 'labs.'])"
    )
    done = subprocess.run([sys.executable, "-c", load], cwd=ROOT, capture_output=True, text=True, check=True)
    empty = {"labs.claims", "labs.exercises"}  # packages with nothing but a docstring
    assert set(done.stdout.split()) - found - empty == set()


def test_the_page_of_all_claims_depends_on_all_judges_and_on_their_sheets(tmp_path, monkeypatch):
    eleven, three = (next((ROOT / "notebooks").glob(f"{n}_*.ipynb")) for n in ("11", "03"))
    assert {"labs.claims.nb03", "labs.claims.nb08"} <= fingerprint.modules_behind(eleven)
    changed = tmp_path / "claims.toml"
    text = (ROOT / "labs" / "kit" / "claims.toml").read_text("utf-8")
    changed.write_text(text.replace('changes = "', 'changes = "Not '), encoding="utf-8")
    before = fingerprint.code_behind(eleven), fingerprint.code_behind(three)
    monkeypatch.setattr(fingerprint, "DATA", [changed if d.endswith("claims.toml") else d for d in fingerprint.DATA])
    after = fingerprint.code_behind(eleven), fingerprint.code_behind(three)
    assert after[0] != before[0] and after[1] == before[1]


@pytest.fixture
def copy(tmp_path):
    """A small course of its own: one notebook, one module."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "area.py").write_text(CODE)
    write(tmp_path / "notebooks" / "00_a.ipynb", "1 + 1")
    return tmp_path


def write(path, source, **metadata):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_code_cell(source, id="one")]
    nbformat.write(new_notebook(cells=cells, metadata=kernel | metadata), path)


def test_course_is_the_same_after_running_and_with_other_line_ends_and_another_after_an_edit(copy):
    before, path = fingerprint.course(copy), copy / "notebooks" / "00_a.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].execution_count = 7
    nbformat.write(notebook, path)
    (copy / "labs" / "area.py").write_bytes(CODE.replace("\n", "\r\n").encode())  # as git writes it on Windows
    assert fingerprint.course(copy) == before
    write(path, "1 + 2")
    edited = fingerprint.course(copy)
    (copy / "labs" / "area.py").write_text(CODE.replace("r**2", "r**3"))
    assert len({before, edited, fingerprint.course(copy)}) == 3


def test_no_notebooks_and_a_broken_one_are_named(copy):
    (copy / "notebooks" / "00_a.ipynb").write_text('{"cells": 3}')
    with pytest.raises(ValueError, match=r"00_a\.ipynb is not a notebook"):
        fingerprint.course(copy)
    shutil.rmtree(copy / "notebooks")
    with pytest.raises(FileNotFoundError, match="there are no notebooks"):
        fingerprint.course(copy)


def test_rerun_stamps_what_ran_and_an_edit_makes_it_stale(copy, monkeypatch):
    path = copy / "notebooks" / "00_a.ipynb"
    assert rerun.stale(path) == "it does not say which code its outputs came from"
    rerun.rerun(path)
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[0].outputs[0].data["text/plain"] == "2" and "execution" not in notebook.cells[0].metadata
    assert rerun.stale(path) == ""
    notebook.cells[0].source = "1 + 2"
    nbformat.write(notebook, path)
    assert rerun.stale(path) == "its cells changed after it was run"
    monkeypatch.setattr(fingerprint, "code_behind", lambda path: "0" * 12)
    assert rerun.stale(path) == "its cells and code changed after it was run"


@pytest.mark.drill
def test_a_notebook_that_fails_is_left_as_it_was(copy, capsys):
    path = copy / "notebooks" / "00_a.ipynb"
    write(path, "1 / 0")
    before = path.read_bytes()
    assert not rerun._one(path)
    assert path.read_bytes() == before and "ZeroDivisionError" in capsys.readouterr().err
