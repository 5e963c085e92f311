"""show_code and show_diff: the source that runs next, the same everywhere."""

import importlib
from pathlib import Path

import pytest

from labs.kit import code
from labs.kit.code import code_shown, diff_shown
from labs.kit.errors import BadInput

ROOT = Path(__file__).parents[1]
MODULE = '''import functools


def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)

    return inner


class Loop:
    """Steps."""

    def step(self, x):
        # the only line
        return x + 1

    @staticmethod
    def pair():
        return 1, 2


@logged
def train(n):
    """`n` steps: ```fenced```."""
    return n


def make():
    def inner(x):
        return 2 * x

    return inner
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of its own for each test, in a folder that is not the repository."""
    name = f"shown_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module(name)


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """Two recipes and a job file."""
    (tmp_path / "train_a.py").write_text('"""One."""\nimport torch\n\nprint(1)\nprint(3)\n')
    (tmp_path / "train_b.py").write_text('"""One."""\nimport torch\n\nprint(1)\nprint(2)\nprint(4)\n')
    (tmp_path / "train.sbatch").write_text("#!/bin/bash\nsrun x\n")
    monkeypatch.setattr(code, "RECIPES", tmp_path)
    return tmp_path


def test_functions_of_the_course_have_their_path_a_link_and_no_line_number():
    shown = code_shown(code.show_code)
    start = "[labs/kit/code.py](../labs/kit/code.py)\n\n```python\ndef show_code(*parts"
    assert shown["text/markdown"].startswith(start) and shown["text/markdown"].endswith("\n```")
    assert shown["text/plain"].startswith("# labs/kit/code.py\ndef show_code(*parts")
    for folder in ("notebooks", "my"):
        assert (ROOT / folder / ".." / "labs/kit/code.py").resolve().is_file()


def test_what_is_shown_is_in_the_file_now_though_the_kernel_has_imported_another(module):
    path = Path(module.__file__)
    path.write_text("# a new line\n\n\n" + MODULE.replace("return x + 1", "return x + 2"))
    assert "return x + 2" in code_shown(module.Loop.step)["text/plain"]
    path.write_text(MODULE.replace("def step", "def move"))
    with pytest.raises(BadInput, match=r"has no Loop.step any more: restart the kernel$"):
        code_shown(module.Loop.step)


def test_recipes_are_shown_by_name_with_the_language_of_their_kind(recipes):
    assert code_shown("train_a")["text/plain"].startswith('# labs/recipes/train_a.py\n"""One."""')
    assert "[labs/recipes/train_a.py](../labs/recipes/train_a.py)" in code_shown("train_a.py")["text/markdown"]
    assert "```bash\n#!/bin/bash" in code_shown("train.sbatch")["text/markdown"]


def test_a_difference_is_counted_and_has_no_line_numbers(recipes):
    shown = diff_shown("train_a", "train_b")
    assert shown["text/plain"].splitlines() == [
        "# labs/recipes/train_a.py -> labs/recipes/train_b.py: 2 lines added, 1 removed",
        "@@",
        " import torch",
        " ",
        " print(1)",
        "-print(3)",
        "+print(2)",
        "+print(4)",
    ]
    assert '<a href="../labs/recipes/train_a.py">labs/recipes/train_a.py</a> → <a' in shown["text/html"]
    assert shown["text/html"].count("<span") == 4 and "text/markdown" not in shown  # JupyterLab shows one of the two
    assert diff_shown("train_a", "train_a")["text/plain"].endswith(": 0 lines added, 0 removed")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (len, "cannot show len: it has no Python source"),
        ("train_c", "there is no recipe 'train_c'; the recipes are train.sbatch, train_a, train_b"),
        ("../x", "no recipe '../x'"),
    ],
)
def test_what_has_no_source_is_one_line(recipes, part, words):
    with pytest.raises(BadInput) as told:
        code_shown(part)
    assert words in str(told.value) and "\n" not in str(told.value)
