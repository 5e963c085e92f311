"""The doctor's static rules: each is silent on the recipes, and finds its line in one where a line is missing."""

from pathlib import Path

import pytest

from labs.doctor.static_rules import check

RECIPES = Path(__file__).parents[1] / "labs" / "recipes"


def found(folder, source):
    (folder / "train.py").write_text(source)
    return check(folder / "train.py")


def test_no_recipe_is_accused():
    assert not [match for path in RECIPES.glob("*.py") for match in check(path)]


CHANGES = [
    ("train_single", "            optimizer.zero_grad()\n", "", "zero-grad-missing", "backward()"),
    ("train_ddp", "        sampler.set_epoch(step // len(loader))", "        pass", "set-epoch-missing", "Sampler"),
    ("train_ddp_amp", "            scaler.unscale_(optimizer)", "            pass", "clip-before-unscale", "clip_grad"),
]


@pytest.mark.parametrize(("recipe", "line", "instead", "rule", "code"), CHANGES, ids=[c[3] for c in CHANGES])
def test_a_recipe_with_one_changed_line_is_found(recipe, line, instead, rule, code, tmp_path):
    source = (RECIPES / f"{recipe}.py").read_text()
    assert line in source
    [match] = found(tmp_path, source.replace(line, instead))
    assert match.probe == rule and code in match.code and match.line and match.fix


def test_what_a_library_does_is_not_missing(tmp_path):
    loop = "import torch\nloss.backward()\noptimizer.step()\n"
    assert [m.probe for m in found(tmp_path, loop)] == ["zero-grad-missing"]
    assert found(tmp_path, loop.replace("torch", "accelerate")) == []


def test_modules_of_the_scripts_folder_are_read(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("from .steps import one\n")
    (tmp_path / "lib" / "steps.py").write_text("def one(loss, opt):\n    loss.backward()\n    opt.step()\n")
    [match] = found(tmp_path, "import lib\nlib.one(1, 2)\n")
    assert (Path(match.file).name, match.line, match.wrong) == ("steps.py", 2, True)


@pytest.mark.parametrize(
    "raw", [b"import torch\nfor x in:\n", b"x = 1\0\n", b"x = " + b"(" * 500 + b")" * 500, b"\xff"]
)
def test_what_cannot_be_read_is_told_and_no_crash(raw, tmp_path):
    (tmp_path / "train.py").write_bytes(raw)
    assert check(tmp_path / "train.py") == []
