"""Every exercise: the reference passes, the stub is to do, typical mistakes are named."""

from __future__ import annotations

import importlib
import inspect

import pytest

from labs.kit.check import TODO, check, examine, exercise_ids, get_exercise

IDS = exercise_ids()


def mutants(exercise_id: str) -> dict:
    """{mistake: (function, words that the feedback must hold)} of one exercise."""
    exercise = get_exercise(exercise_id)
    if hasattr(exercise, "mistakes"):
        assert exercise.id == exercise_id and len(exercise.mistakes) <= 4
        return {m.what: (m.answer, m.what) for m in exercise.mistakes}
    module = importlib.import_module(f"mutants.nb{exercise_id[:2]}")
    return module.MUTANTS.get(exercise_id, {})


SLOW = "00.3 01.2 02.1 02.4 03.3 03.4 05.3 06.1 06.3 07.1 07.2 08.1 08.2 09.1 09.2 10.1 10.2 10.3 12.1".split()
"""Exercises whose checks start processes or take long: `make test` tries the first mistake, `make test-all` each."""

PARTS = [(i, "first") for i in IDS] + [pytest.param(i, "others", marks=pytest.mark.long) for i in SLOW]


@pytest.mark.parametrize("exercise_id", IDS)
def test_reference_passes(exercise_id, capsys):
    check(exercise_id, None, solutions=True)
    assert capsys.readouterr().out == f"{exercise_id} passed: {get_exercise(exercise_id).task}\n"


def test_every_stub_is_to_do(capsys):
    for exercise_id in IDS:
        names = ", ".join(inspect.signature(get_exercise(exercise_id).reference).parameters)
        check(exercise_id, eval(f"lambda {names}: TODO", {"TODO": TODO}))
        assert capsys.readouterr().out == f"{exercise_id} to do: {get_exercise(exercise_id).task}\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("exercise_id", "part"), PARTS)
def test_mistakes_are_named(exercise_id, part):
    known = list(mutants(exercise_id).items())
    chosen = (known[:1] if part == "first" else known[1:]) if exercise_id in SLOW else known
    for name, (answer, words) in chosen:
        outcome = examine(exercise_id, answer)
        assert outcome.state == "not yet", f"{exercise_id} lets {name!r} through: {outcome.text}"
        assert words.lower() in outcome.text.lower(), f"{name}: {outcome.text}"
        raised = "your code raised" in outcome.text.splitlines()[0]
        assert not raised or "Error" in words, f"{name}: a typical mistake has its name"
