"""The doctor's static rules: each fires at its line of the ill example and nowhere else, and its cure silences it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from labs.doctor import rules, rules_steps
from labs.doctor.rules import RULES, UNREADABLE, check

ROOT = Path(__file__).parents[1]
FAMILIES = pytest.mark.parametrize("family", rules.MODULES, ids=lambda module: module.__name__.rpartition(".")[2])


def hits_of(folder, source, name="train.py"):
    path = folder / name
    path.write_text(source)
    return check(path)


def certain(hits):
    return [(h.rule, h.line) for h in hits if h.certainty != "look at it"]


@FAMILIES
def test_an_ill_example_has_its_hit_at_its_line_which_its_cure_ends(family, tmp_path):
    for rule in family.RULES:
        source = rule.ill[0]
        marked = [n for n, line in enumerate(source.splitlines(), 1) if "# <-" in line]
        hits = hits_of(tmp_path, source)
        mine = [h for h in hits if h.rule == rule.name]
        assert marked and [h.line for h in mine] == marked, rule.name
        assert certain(h for h in hits if h.rule != rule.name) == []
        if mine[0].cure.startswith("---"):
            subprocess.run(
                ["patch", "-p1"], input=mine[0].cure, text=True, cwd=tmp_path, check=True, capture_output=True
            )
            left = check(tmp_path / "train.py")
            assert [h.line for h in left if h.rule == rule.name] == [] and certain(left) == []


@FAMILIES
def test_a_healthy_example_has_no_hit_of_its_rule_and_none_that_is_certain(family, tmp_path):
    for rule in family.RULES:
        hits = hits_of(tmp_path, rule.healthy[0])
        assert [h for h in hits if h.rule in (rule.name, UNREADABLE)] == [] and certain(hits) == [], rule.name


@pytest.mark.parametrize("recipe", sorted(p.name for p in (ROOT / "labs/recipes").glob("*.py")))
def test_no_recipe_is_accused(recipe):
    hits = check(ROOT / "labs/recipes" / recipe)
    assert certain(hits) == [] and UNREADABLE not in [h.rule for h in hits]


# A recipe with one line changed, or one left out: (recipe, line, what stands there instead, the rule that must see it)
MUTANTS = [
    ("train_single", "            optimizer.zero_grad()\n", "", "zero-grad-missing"),
    ("train_single", "loss.backward()", "loss.backward()\n            optimizer.zero_grad()", "zero-grad-order"),
    ("train_ddp", "        sampler.set_epoch(step // len(loader))", "        pass", "set-epoch-missing"),
    ("train_ddp_amp", "            scaler.unscale_(optimizer)", "            pass", "clip-before-unscale"),
    ("train_ddp_resume", "save(args.checkpoint, state)", "torch.save(state, args.checkpoint)", "save-not-atomic"),
]


@pytest.mark.parametrize(("recipe", "line", "instead", "rule"), MUTANTS, ids=[f"{m[0]}-{m[3]}" for m in MUTANTS])
def test_a_recipe_with_one_changed_line_is_seen(recipe, line, instead, rule, tmp_path):
    source = (ROOT / f"labs/recipes/{recipe}.py").read_text()
    assert line in source
    assert rule in [h.rule for h in hits_of(tmp_path, source.replace(line, instead))]


LIBRARY = {
    "train.py": "from loops.fit import Fitter\nimport helpers\n\nFitter(helpers.optimizer()).fit([])\n",
    "helpers.py": "import torch as t\n\ndef optimizer():\n    return t.optim.SGD([], lr=1.0)\n",
    "loops/__init__.py": "",
    "loops/fit.py": """from .steps import one_step

class Base:
    def fit(self, loader):
        for batch in loader:
            self.one(batch)

class Fitter(Base):
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def one(self, batch):
        one_step(batch, self.optimizer)
""",
    "loops/steps.py": "def one_step(batch, rule):\n    loss = batch.sum()\n    loss.backward()\n    rule.step()\n",
}


def test_a_step_is_followed_through_packages_relative_imports_classes_and_arguments(tmp_path):
    """Neither the loop, nor the optimizer, nor the step stands in the script; nothing but the data flow names it."""
    for name, source in LIBRARY.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    [hit] = check(tmp_path / "train.py")
    assert (hit.rule, Path(hit.file).name, hit.line, hit.code) == (
        "zero-grad-missing",
        "steps.py",
        3,
        "loss.backward()",
    )
    (tmp_path / "loops/steps.py").write_text(
        LIBRARY["loops/steps.py"].replace("rule.step()", "rule.step()\n    rule.zero_grad()")
    )
    assert check(tmp_path / "train.py") == []


def test_a_mistake_of_a_rule_is_told_and_the_others_are_heard(tmp_path, monkeypatch):
    def fails(*args):
        raise IndexError(2)

    source = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
    broken = [replace(r, find=fails) if r.name == "save-not-atomic" else r for r in RULES]
    monkeypatch.setattr(rules, "RULES", broken)
    found, told = hits_of(tmp_path, source)
    assert (
        (found.rule, told.rule) == ("amp-old", UNREADABLE)
        and "save-not-atomic" in told.why
        and "IndexError" in told.why
    )
    monkeypatch.setattr(rules, "Program", fails)
    [told] = hits_of(tmp_path, source)
    assert told.rule == UNREADABLE and "IndexError" in told.why


@pytest.mark.parametrize(
    ("raw", "line", "told"),
    [
        (b"import torch\nfor x in:\n", 2, "invalid syntax"),
        (b"x = 1\0\n", 0, "null bytes"),
        (b"x = " + b"(" * 500 + b")" * 500, None, ""),
    ],
    ids=["syntax", "null", "parentheses"],
)
def test_what_cannot_be_read_is_one_hit_and_no_crash(raw, line, told, tmp_path):
    (tmp_path / "train.py").write_bytes(raw)
    hits = check(tmp_path / "train.py")
    assert {h.rule for h in hits} == {UNREADABLE} and all(told in h.why for h in hits)
    assert line is None or [h.line for h in hits] == [line]


def test_names_that_go_in_circles_end(tmp_path):
    """A name for itself, functions that call each other, a class that is its own base."""
    source = rules_steps.HEALTHY + (
        "\ndef a(x):\n    y = x\n    x = y\n    return b(x)\n\ndef b(x):\n    return a(x)\n\nclass C(C):\n    pass\n"
        "bar = enumerate(bar)\nbar = tqdm(bar)\nfor i, x in bar:\n    a(x).backward()\n    C().step()\n    opt.step()\n"
        "    opt.zero_grad()\n"
    )
    assert certain(hits_of(tmp_path, source)) == []
