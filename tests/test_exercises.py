"""Every exercise: the reference passes, the stub is to do, typical mistakes are named, each in its own words."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from labs import chapters
from labs.kit.check import TODO, check, examine, exercise_ids, get_exercise

IDS = exercise_ids()
MUTANTS_NEEDED, MUTANTS_ENOUGH = 4, 8


def mutants(exercise_id: str) -> dict:
    """{mistake: (function, words that the feedback must hold)} of one exercise."""
    module = importlib.import_module(f"mutants.nb{exercise_id[:2]}")
    return module.MUTANTS.get(exercise_id, {})


START_PROCESSES = "00.3 02.1 02.4 03.2 03.4 05.1 06.3 07.1 07.2 08.1 08.2 10.1 10.2".split()
"""Exercises whose check takes a second or more: `make test` tries the first mistake, `make test-all` each."""
ONLY: dict[str, list[str]] = {"12.1": []}
"""Exercises whose checks train: `make test` tries mistakes in test_exercise_capstone."""

ALONE = {"12.1"}
"""It is timed: `make test` checks its reference in test_exercise_capstone, with nothing beside it."""


def quick(exercise_id: str) -> list[str]:
    """The mistakes that `make test` tries."""
    some = 1 if exercise_id in START_PROCESSES else MUTANTS_ENOUGH
    return ONLY.get(exercise_id, list(mutants(exercise_id))[:some])


def marks(exercise_id: str, long: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] * long + [pytest.mark.quiet] * (exercise_id in ALONE)


MUTANTS = [pytest.param(i, name, marks=marks(i, name not in quick(i))) for i in IDS for name in mutants(i)]


def test_each_notebook_with_exercises_has_mutants_for_exercises_that_exist():
    for path in [p.parent for p in Path(chapters.__file__).parent.glob("nb*/exercises.py")]:
        module = importlib.import_module(f"mutants.{path.stem}")
        own = importlib.import_module(f"labs.chapters.{path.stem}.exercises").EXERCISES
        assert set(module.MUTANTS) == set(own), f"{path.stem}: exercises and mutants differ"
        assert all(i.startswith(f"{path.stem[2:]}.") for i in own)
        assert 2 <= len(own) <= 4, f"a notebook has 2 to 4 exercises, {path.stem} has {len(own)}"


@pytest.mark.parametrize("exercise_id", [pytest.param(i, marks=marks(i, i in ALONE)) for i in IDS])
def test_reference_passes(exercise_id, capsys):
    check(exercise_id, None, solutions=True)
    assert capsys.readouterr().out == f"{exercise_id} passed: {get_exercise(exercise_id).title}\n"


@pytest.mark.parametrize("exercise_id", IDS)
def test_stub_is_to_do(exercise_id, capsys):
    names = ", ".join(inspect.signature(get_exercise(exercise_id).reference).parameters)
    check(exercise_id, eval(f"lambda {names}: TODO", {"TODO": TODO}))
    assert capsys.readouterr().out == f"{exercise_id} to do: {get_exercise(exercise_id).title}\n"


@pytest.mark.parametrize("exercise_id", IDS)
def test_reference_is_documented_and_checkers_say_what_they_want(exercise_id):
    exercise = get_exercise(exercise_id)
    assert exercise.reference.__doc__, "the reference is shown to learners: it needs a docstring"
    assert exercise.title and not exercise.title.endswith(".")


@pytest.mark.parametrize("exercise_id", IDS)
def test_as_many_typical_mistakes_as_there_are_kinds(exercise_id):
    assert MUTANTS_NEEDED <= len(mutants(exercise_id)) <= MUTANTS_ENOUGH, "each of another kind"


_feedback: dict[str, dict[str, str]] = {}


def feedback(exercise_id: str, name: str) -> str:
    """What the learner reads for one mistake; each is run once."""
    seen = _feedback.setdefault(exercise_id, {})
    if name not in seen:
        outcome = examine(exercise_id, mutants(exercise_id)[name][0])
        assert outcome.state == "not yet", f"{exercise_id} lets {name!r} through: {outcome.text}"
        seen[name] = outcome.text
    return seen[name]


@pytest.mark.parametrize(("exercise_id", "name"), MUTANTS)
def test_mistake_is_named(exercise_id, name):
    said = feedback(exercise_id, name)
    words = mutants(exercise_id)[name][1]
    assert words.lower() in said.lower()
    assert "your code raised" not in said.splitlines()[0] or "Error" in words, "a typical mistake deserves its name"


@pytest.mark.parametrize("names", [quick, pytest.param(mutants, marks=pytest.mark.long)])
@pytest.mark.parametrize("exercise_id", [pytest.param(i, marks=marks(i, False)) for i in IDS])
def test_each_mistake_has_feedback_of_its_own(exercise_id, names):
    seen: dict[str, str] = {}
    for name in names(exercise_id):
        said = feedback(exercise_id, name)
        assert said not in seen, f"{name!r} and {seen[said]!r} are told the same"
        seen[said] = name
