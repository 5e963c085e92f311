"""Exercise 08.3: right answers of another style pass, each mistake has its name, cases are what they say."""

from __future__ import annotations

import pandas
import pytest
from mutants.nb08_plan import MORE, MUTANTS, planner

from labs.chapters.nb08 import exercise_plan as exercise
from labs.chapters.nb08 import plan_cases as cases
from labs.kit.check import Mistake
from labs.parts.checkpoints import checkpoint_interval

WRONG = MUTANTS["08.3"] | MORE


def feedback(answer) -> str:
    with pytest.raises(Mistake) as e:
        exercise.check_plan(answer)
    return str(e.value)


def in_pandas(options, steps, band, deadline_h, budget):
    """A table in place of a loop, and Daly's interval in place of the exact one."""
    t = pandas.DataFrame([vars(o) for o in options])
    t = t[t.needs_gb <= t.memory_gb].copy()
    t["lost"] = [
        checkpoint_interval.lost_share(checkpoint_interval.daly(s, m), s, m, r)
        for s, m, r in zip(t.save_s, t.gpu_mtbf_h * 3600 / t.gpus, t.restart_s, strict=True)
    ]
    t["hours"] = t.startup_h + band[1] * t.step_s * steps / 3600 / (1 - t.lost)
    t["money"] = t.hours * t.price * t.gpus
    t = t[(t.hours <= deadline_h) & (t.money <= budget)].sort_values("money")
    return None if t.empty else t.iloc[0][["name", "hours", "money"]].tolist()


def sorted_first(options, steps, band, deadline_h, budget):
    """Cheapest first, the first one that keeps the deadline; with Young's interval."""

    def promised(o):
        m = 3600 * o.gpu_mtbf_h / o.gpus
        lost = checkpoint_interval.lost_share(checkpoint_interval.young(o.save_s, m), o.save_s, m, o.restart_s)
        hours = o.startup_h + steps * band[1] * o.step_s / (3600 * (1 - lost))
        return hours * o.gpus * o.price, hours, o.name

    for money, hours, name in sorted(promised(o) for o in options if o.memory_gb >= o.needs_gb):
        if money > budget:
            return None
        if hours <= deadline_h:
            return name, hours, money
    return None


@pytest.mark.parametrize("right", [exercise.plan, planner(), in_pandas, sorted_first])
def test_right_plans_of_any_style_pass(right):
    exercise.check_plan(right)


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_its_name(name):
    plan, words = WRONG[name]
    assert words in feedback(plan)


def test_no_two_mistakes_are_told_the_same():
    assert len({feedback(plan) for plan, _ in WRONG.values()}) == len(WRONG)
    assert set(exercise.SLIPS) == set(cases.TRAPS)


def test_two_mistakes_at_once_are_answered_with_the_first_case_that_breaks():
    said = feedback(planner(band=lambda b: 1.0, startup=False, lost=False))
    assert said.startswith("case(3") and "at the upper end" in said


def test_odd_answers_are_told():
    assert "you book nothing" in feedback(lambda *_: None)
    assert "you return 3, not" not in feedback(lambda *_: 3) and "name, hours, money" in feedback(lambda *_: 3)
    assert "is no option" in feedback(lambda *_: ("the moon", 1, 1))
    assert "not a number" in feedback(lambda options, *_: (options[0].name, "soon", 1))


def test_right_option_with_wrong_money_is_told_with_both_numbers():
    def plan(*given):
        right = exercise.plan(*given)
        return right and (right[0], right[1], 1.1 * right[2])

    assert "and you promise" in feedback(plan)


def test_cases_are_clear_and_each_trap_is_there_twice():
    found = [cases.case(seed) for seed in exercise.SEEDS]
    plans = [cases.chosen(c) for c in found]
    assert 1 <= plans.count(None) <= len(plans) // 3, "no plan is an answer, not the usual one"
    for name, way in cases.TRAPS.items():
        wrong = [(p and p[0]) != ((w := cases.chosen(c, way(c))) and w[0]) for p, c in zip(plans, found, strict=True)]
        assert sum(wrong) >= 2, name
    assert cases.case(300) == cases.case.__wrapped__(300), "from its seed alone"


def test_a_promise_by_hand():
    option = cases.Option("x", 10, 2.0, 3.6, 50, 80, 0.5, 100.0, 36.0, 0.0)
    made = cases.Case((option,), 10_000, (0.9, 1.5), 24, 1000)
    mtbf_s = 36_000
    lost = checkpoint_interval.lost_share(checkpoint_interval.optimum(36.0, mtbf_s), 36.0, mtbf_s)
    hours = 0.5 + 15 / (1 - lost)
    assert cases.promise(made, option) == pytest.approx((hours, 20 * hours))
    assert 15.5 < hours < 16.3 and lost == pytest.approx((2 * 36 / mtbf_s) ** 0.5, rel=0.05)


def test_a_case_is_shown_with_all_it_needs(capsys):
    cases.show(cases.case(300))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(cases.case(300).options) and "per GPU and hour" in lines[1]
