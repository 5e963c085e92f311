"""The learner's copies: without outputs, made once, never overwritten, and told when the course has moved on."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from processes import new_environment

from labs.kit import copies
from labs.kit.errors import BadInput

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
A, B = "00_a", "01_b"


def write_original(root: Path, name: str, source: str = "predict(3)", output: str = "3") -> Path:
    """A notebook of the course, as committed: with an output and the stamp of its run."""
    shown = [new_output("stream", text=output)]
    cells = [new_markdown_cell(f"# {name}"), new_code_cell(source, outputs=shown, execution_count=1)]
    path = root / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    metadata = {"course_run": {"cells": "0"}, "kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
    return path


@pytest.fixture
def course(tmp_path):
    """A course of two notebooks, in a folder with a space in its name, copied once."""
    root = tmp_path / "my course"
    root.mkdir()
    write_original(root, A)
    write_original(root, B)
    assert states(root) == {A: "made", B: "made"}
    return root


def states(root: Path, *names: str, beside: bool = False) -> dict[str, str]:
    return {found.name: found.state for found in copies.update(names, root, beside=beside)}


def said(root: Path) -> str:
    return "\n".join(copies.lines(copies.update(root=root)))


def edit(path: Path, change) -> bytes:
    """Change a notebook as JupyterLab saves it; returns the file's bytes."""
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)
    return path.read_bytes()


def write_a_prediction(notebook):
    notebook.cells[1].source = "predict(4)"


def run_it(notebook):
    notebook.cells[1].outputs = [new_output("stream", text="3")]


def run_it_without_an_output(notebook):
    notebook.cells[1].execution_count = 1


def delete_a_cell(notebook):
    del notebook.cells[0]


def no_more(notebook):
    """What JupyterLab itself writes when a kernel starts and a cell is folded."""
    notebook.metadata["language_info"] = {"name": "python", "version": "3.99"}
    notebook.cells[1].metadata["collapsed"] = True


WORK = [write_a_prediction, run_it, run_it_without_an_output, delete_a_cell]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The course itself, in a folder with a space in its name."""
    root = tmp_path_factory.mktemp("real") / "my course"
    for name in ("notebooks", "labs", "records", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in (".gitignore", "GLOSSARY.md"):
        shutil.copy(ROOT / name, root)
    return root


def test_a_copy_is_the_notebook_without_what_a_run_left(real):
    copies.update(root=real)
    for original in NOTEBOOKS:
        had, has = (nbformat.read(p, as_version=4) for p in (original, real / "my" / original.name))
        nbformat.validate(has)
        keep = ("id", "cell_type", "source", "metadata")
        assert [[c.get(k) for k in keep] for c in has.cells] == [[c.get(k) for k in keep] for c in had.cells]
        assert not any(c.get("outputs") or c.get("execution_count") for c in has.cells)
        assert set(has.metadata) == {"course_copy", "kernelspec", "language_info"}


def test_links_and_pictures_work_from_there(real):
    copies.update(root=real)
    found = 0
    for path in sorted((real / "my").glob("*.ipynb")):
        texts = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
        targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", "\n".join(texts))
        own = [t for pair in targets if (t := "".join(pair).partition("#")[0]) and not re.match(r"[a-z]+:", t)]
        assert [t for t in own if not (path.parent / t).exists()] == []
        assert [t for t in own if "notebooks/" in t] == [], "leads out of my/, to the answers"
        found += len(own)
    assert found > 2 * len(NOTEBOOKS)


@pytest.fixture(scope="module")
def committed(real):
    """The same under version control."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    identity = ["-c", "user.name=course", "-c", "user.email=course@localhost"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "The course"]):
        subprocess.run(["git", "-C", real, *command], check=True)
    return real


@pytest.mark.timeout(200)
@pytest.mark.long
def test_git_sees_nothing_of_a_day_of_learning(committed, tmp_path):
    """Copies made, one cut short, run and saved, in a room: `git status` is as clean as in the morning."""
    environment = new_environment(COURSE_SMOKE="1", COURSE_ROOM=str(tmp_path / "room"), COURSE_NAME="ada")
    environment["PYTHONPATH"] = os.pathsep.join([str(committed), environment["PYTHONPATH"]])
    (tmp_path / "room").mkdir()
    shutil.rmtree(committed / "my", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "labs.kit.copies"], env=environment, cwd=committed, check=True)
    path = committed / "my" / "00_gpu_checks.ipynb"
    edit(path, lambda notebook: notebook.update(cells=notebook.cells[:20]))
    nbconvert = "nbconvert --to notebook --execute --inplace --ExecutePreprocessor.kernel_name=python3"
    run = [sys.executable, "-m", *nbconvert.split(), str(path)]
    done = subprocess.run(run, env=environment, cwd=path.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ran = nbformat.read(path, as_version=4)
    assert all(c.execution_count for c in ran.cells if c.cell_type == "code" and c.source.strip())
    assert list((tmp_path / "room" / "ada").glob("*.jsonl")), "the room keeps what is measured in my/"
    status = ["git", "-C", committed, "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""
    assert copies.update(["00_gpu_checks"], committed)[0].state == "current"


@pytest.mark.parametrize("work", [*WORK, no_more])
def test_a_copy_is_made_once(course, work):
    kept = edit(course / "my" / f"{A}.ipynb", work)
    assert states(course) == {A: "current", B: "current"} and said(course) == ""
    assert (course / "my" / f"{A}.ipynb").read_bytes() == kept


@pytest.mark.parametrize("work", [write_a_prediction, run_it])
def test_work_stays_when_the_course_moves_on_and_the_new_one_comes_beside_it(course, work):
    mine = course / "my" / f"{A}.ipynb"
    kept = edit(mine, work)
    write_original(course, A, "predict(5)")
    assert states(course) == {A: "old", B: "current"}
    assert f"my/{A}.ipynb" in said(course) and "labs.kit.copies 00" in said(course)
    assert states(course, A, beside=True) == {A: "beside"}
    new = next((course / "my").glob("00_new_*_a.ipynb"))
    assert nbformat.read(new, as_version=4).cells[1].source == "predict(5)"
    assert said(course) == "" and mine.read_bytes() == kept
    newer = edit(new, work)
    write_original(course, A, "predict(6)")
    assert states(course, A, beside=True) == {A: "beside"}, "a second one on the same day"
    assert len(list((course / "my").glob("00_new_*_a.ipynb"))) == 2
    assert mine.read_bytes() == kept and new.read_bytes() == newer


def test_a_copy_that_holds_no_work_is_renewed(course):
    edit(course / "my" / f"{A}.ipynb", no_more)
    write_original(course, A, "predict(5)")
    assert f"my/{A}.ipynb has been replaced by the new version" in said(course)
    assert nbformat.read(course / "my" / f"{A}.ipynb", as_version=4).cells[1].source == "predict(5)"
    assert states(course) == {A: "current", B: "current"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "cannot be read"),
        ('{"cells": [], "metadata": {"course_copy": {"of": "00_a", "cells": "0"}}}', "older version"),
    ],
)
def test_whatever_stands_there_stays_and_is_told(course, text, told):
    mine = course / "my" / f"{A}.ipynb"
    mine.write_text(text)
    assert told in said(course) and mine.read_text() == text
    assert states(course, A, beside=True) == {A: "beside"} and mine.read_text() == text


def test_a_damaged_original_is_one_line(course):
    write_original(course, "02_c").write_text("<<<<<<< HEAD")
    with pytest.raises(BadInput, match="git checkout -- notebooks/02_c"):
        copies.update(root=course)


# -- what cannot work is one line, and nothing is half written


def test_two_that_start_at_the_same_time_make_each_copy_once(real):
    shutil.rmtree(real / "my", ignore_errors=True)
    environment = new_environment(PYTHONPATH=str(real))
    command = [sys.executable, "-m", "labs.kit.copies"]
    running = [subprocess.Popen(command, cwd=real, env=environment) for _ in range(3)]
    assert [p.wait() for p in running] == [0, 0, 0]
    assert sorted(p.name for p in (real / "my").iterdir()) == [p.name for p in NOTEBOOKS]


def test_a_disk_that_is_full_leaves_nothing_half_written(real):
    """As a limit on the size of a file, between those of the smallest copy and of the largest."""
    copies.update(root=real)
    sizes = sorted(p.stat().st_size for p in (real / "my").glob("*.ipynb"))
    shutil.rmtree(real / "my")
    limit = sizes[len(sizes) // 2]
    done = subprocess.run(
        [sys.executable, "-m", "labs.kit.copies"],
        cwd=real,
        env=new_environment(PYTHONPATH=str(real)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "cannot write in" in done.stderr
    for path in (real / "my").iterdir():
        assert path.suffix == ".ipynb" and not path.name.startswith(".")
        nbformat.validate(nbformat.read(path, as_version=4))
    assert all(f.state in ("made", "current") for f in copies.update(root=real))
    assert len(list((real / "my").iterdir())) == len(NOTEBOOKS)


def test_my_that_is_no_folder_is_one_line(course):
    shutil.rmtree(course / "my")
    (course / "my").symlink_to("nowhere")
    with pytest.raises(BadInput, match="cannot write in"):
        copies.update(root=course)
