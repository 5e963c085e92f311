"""Exercise 09.3: right answers of another style pass, each mistake has its name, the hidden illness is real."""

from __future__ import annotations

import pytest
from again import holds_soon
from mutants.nb09_clinic import MORE, MUTANTS, right

from labs.chapters.nb09 import exercise_two_illnesses as exercise
from labs.kit.check import Mistake

WRONG = MUTANTS["09.3"] | MORE


def feedback(answer) -> str:
    with pytest.raises(Mistake) as e:
        exercise.check_treatment(answer)
    return str(e.value)


def by_cases(measure, healthy):
    """No loop: the three things that can be, written out."""
    loader, training = measure("loader alone"), measure("same batch")
    well = {"loader": loader <= 1.15 * healthy["loader"], "training": training <= 1.15 * healthy["training"]}
    first, second = ("loader", "training") if loader >= training else ("training", "loader")
    other = training if second == "training" else loader
    if well[first]:
        return []
    after = max(healthy[first], other)
    if well[second] or other <= healthy[first]:
        return [(first, after)]
    return [(first, after), (second, max(healthy.values()))]


def recursive(measure, healthy):
    """Tuples in place of dictionaries, and a call for each cure."""

    def cured(sides):
        (name, seconds, well), other = sorted(sides, key=lambda s: -s[1])
        if seconds <= 1.15 * well:
            return ()
        return ([name, max(well, other[1])], *cured([(name, well, well), other]))

    return cured(
        [
            ("loader", measure("loader alone"), healthy["loader"]),
            ("training", measure("same batch"), healthy["training"]),
        ]
    )


@pytest.mark.parametrize("answer", [exercise.treatment, right, by_cases, recursive])
def test_right_answers_of_any_style_pass(answer):
    exercise.check_treatment(answer)


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_its_name(name):
    function, words = WRONG[name]
    assert words in feedback(function)


def test_no_two_mistakes_are_told_the_same():
    assert len({feedback(f) for f, _ in WRONG.values()}) == len(WRONG)


def test_odd_answers_are_told():
    assert "you return 3, " not in feedback(lambda m, h: 3) and "return a list" in feedback(lambda m, h: 3)
    assert "not a number" in feedback(lambda m, h: [("loader", "soon")])
    assert "you cure 'network'" in feedback(lambda m, h: [("network", 1.0)])
    assert "you measure 'gpu'" in feedback(lambda m, h: m("gpu"))
    assert "you cure nothing; training comes first" in feedback(lambda m, h: [])


def test_cases_hold_both_orders_a_healthy_one_and_one_that_no_cure_helps():
    plans = [[cure for cure, _ in exercise.right(ward)] for ward in exercise.CASES]
    both = ["loader", "training"]
    assert plans == [both[::-1], both, ["loader"], ["training"], [], [], both]
    assert exercise.right(exercise.CASES[0]) == [("training", 0.020), ("loader", 0.006)]


def test_a_real_pipeline_hides_one_illness_behind_the_other():
    def hides(found: dict[str, float]) -> bool:
        gains = {name: found["as it is"] / seconds for name, seconds in found.items()}
        return gains["loader cured"] < 1.15 and gains["training cured"] < 1.5 and gains["both cured"] > 2

    again = lambda: exercise.in_real_time(steps=8, rounds=3)  # noqa: E731
    assert holds_soon(hides, again(), again)
