"""The doctor's static rules: each fires at its line of the ill example and nowhere else, and its cure silences it."""

import re
import subprocess

import pytest

from labs.parts.doctor.rules import RULES, check

BY_NAME = {r.name: r for r in RULES}
ILL = [pytest.param(r, source, id=f"{r.name}-{n}") for r in RULES for n, source in enumerate(r.ill)]
HEALTHY = [pytest.param(r, source, id=f"{r.name}-{n}") for r in RULES for n, source in enumerate(r.healthy)]


def hits_of(folder, source, name="train.py"):
    path = folder / name
    path.write_text(source)
    return check(path)


@pytest.mark.parametrize(("rule", "source"), ILL)
def test_an_ill_example_has_its_hit_at_its_line_and_no_other_that_is_certain(rule, source, tmp_path):
    marked = [n for n, line in enumerate(source.splitlines(), 1) if "# <-" in line]
    hits = hits_of(tmp_path, source)
    assert [h.line for h in hits if h.rule == rule.name] == marked
    assert [h.rule for h in hits if h.rule != rule.name and h.certainty != "look at it"] == []


@pytest.mark.parametrize(("rule", "source"), HEALTHY)
def test_a_healthy_example_has_no_hit_of_its_rule_and_none_that_is_certain(rule, source, tmp_path):
    assert [(h.rule, h.line) for h in hits_of(tmp_path, source) if h.rule == rule.name or h.certainty != "look at it"] == []


@pytest.mark.parametrize(("rule", "source"), ILL)
def test_a_cure_that_is_a_diff_can_be_patched_in_and_ends_the_hit(rule, source, tmp_path):
    first = next(h for h in hits_of(tmp_path, source) if h.rule == rule.name)
    if not first.cure.startswith("---"):
        assert first.cure == rule.cure
        return
    subprocess.run(["patch", "-p1"], input=first.cure, text=True, cwd=tmp_path, check=True, capture_output=True)
    left = check(tmp_path / "train.py")
    assert [h.line for h in left if h.rule == rule.name] == []
    assert not [h for h in left if h.certainty != "look at it"]
