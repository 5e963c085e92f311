"""Every exercise: the reference passes, the stub is to do, typical mistakes are named."""

from __future__ import annotations

import importlib
import inspect

import pytest

from labs.kit.check import TODO, check, examine, exercise_ids, get_exercise

IDS = exercise_ids()


def mutants(exercise_id: str) -> dict:
    """{mistake: (function, words that the feedback must hold)} of one exercise."""
    module = importlib.import_module(f"mutants.nb{exercise_id[:2]}")
    return module.MUTANTS.get(exercise_id, {})


START_PROCESSES = "00.3 02.1 02.4 03.4 07.1 07.2 08.1 08.2 10.1 10.2".split()
"""Exercises whose check takes a second or more: `make test` tries the first mistake, `make test-all` each."""
ONLY: dict[str, list[str]] = {"12.1": []}
"""Exercises whose checks train: `make test` tries mistakes in test_exercise_capstone."""

ALONE = {"12.1"}
"""It is timed: `make test` checks its reference in test_exercise_capstone, with nothing beside it."""


def quick(exercise_id: str) -> list[str]:
    """The mistakes that `make test` tries."""
    some = 1 if exercise_id in START_PROCESSES else None
    return ONLY.get(exercise_id, list(mutants(exercise_id))[:some])


def marks(exercise_id: str, long: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] * long + [pytest.mark.quiet] * (exercise_id in ALONE)


MUTANTS = [pytest.param(i, name, marks=marks(i, name not in quick(i))) for i in IDS for name in mutants(i)]


@pytest.mark.parametrize("exercise_id", [pytest.param(i, marks=marks(i, i in ALONE)) for i in IDS])
def test_reference_passes(exercise_id, capsys):
    check(exercise_id, None, solutions=True)
    assert capsys.readouterr().out == f"{exercise_id} passed: {get_exercise(exercise_id).title}\n"


@pytest.mark.parametrize("exercise_id", IDS)
def test_stub_is_to_do(exercise_id, capsys):
    names = ", ".join(inspect.signature(get_exercise(exercise_id).reference).parameters)
    check(exercise_id, eval(f"lambda {names}: TODO", {"TODO": TODO}))
    assert capsys.readouterr().out == f"{exercise_id} to do: {get_exercise(exercise_id).title}\n"


@pytest.mark.parametrize(("exercise_id", "name"), MUTANTS)
def test_mistake_is_named(exercise_id, name):
    answer, words = mutants(exercise_id)[name]
    outcome = examine(exercise_id, answer)
    assert outcome.state == "not yet", f"{exercise_id} lets {name!r} through: {outcome.text}"
    assert words.lower() in outcome.text.lower()
    assert "your code raised" not in outcome.text.splitlines()[0] or "Error" in words, "a typical mistake has its name"
