"""A script or a module in this process does what it does when Python itself starts it."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from labs.kit import as_main
from labs.kit.errors import BadInput

TOLD = """
import multiprocessing, os, sys
def child(): print("child of", child.__module__, flush=True)
if __name__ == "__main__":
    print(__name__, sys.argv, __file__, sys.path[0], __package__, __spec__ and __spec__.name)
    print(sys.modules["__main__"].__dict__ is globals(), sys.path.count(sys.path[0]))
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start(); process.join(); sys.exit(process.exitcode + 3)
"""
FILES = {
    "train.py": TOLD,
    "pkg/__init__.py": "print('the package around it is imported')",
    "pkg/model.py": "size = 3",
    "pkg/train.py": "from .model import size" + TOLD,
    "pkg/sub/__main__.py": "from ..model import size\nimport sys\nprint(__name__, __spec__.name, sys.argv)",
}
RUN = """import sys
from labs.kit import as_main
name, path = as_main.module_file(sys.argv[1]) if sys.argv[1] != "train.py" else ("", sys.argv[1])
as_main.run([path, *sys.argv[2:]], name)"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("what", ["train.py", "pkg.train", "pkg.sub"])
def test_it_does_what_it_does_alone(here, what):
    alone = [what] if what.endswith(".py") else ["-m", what]
    found = [
        subprocess.run([sys.executable, *start, "--lr", "0.1"], capture_output=True, text=True, timeout=60)
        for start in (alone, ["-c", RUN, what])
    ]
    assert [found[0].stdout, found[0].returncode] == [found[1].stdout, found[1].returncode] and not found[1].stderr
    assert "__main__" in found[0].stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "no module nothing in this folder"),
        ("pkg", "pkg has no Python file to run"),
        ("pkg/train", "no module pkg/train"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_imports_nothing(here, name, told, capsys):
    with pytest.raises(BadInput, match=told) as error:
        as_main.module_file(name)
    assert "\n" not in str(error.value) and "imported" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--n", "2", "train.py", "-m", "x"], (2, ["train.py", "-m", "x"], "")),
        (["-m", "pkg.train", "--n", "3", "-m"], (1, ["{here}/pkg/train.py", "--n", "3", "-m"], "pkg.train")),
    ],
)
def test_a_script_or_a_module_ends_the_options(here, args, expected):
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=1)
    given, argv, module = as_main.parse(parser, args)
    assert (given.n, argv, module) == (expected[0], [a.format(here=here) for a in expected[1]], expected[2])
