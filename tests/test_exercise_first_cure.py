"""Exercise 12.2: right answers with other intervals pass, mistakes have their name on every made run."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from mutants.nb12_first_cure import MUTANTS, by_name
from speeds import first

from labs.chapters.nb12.exercise_first_cure import AS_IS, SEEDS, case, check_worth_it, worth_it
from labs.kit.check import Mistake
from labs.kit.measure import paired_ratio


def with_own_bootstrap(turns, samples):
    """Plain percentiles of resampled medians."""
    draw, low = random.Random(5), {}
    for name in turns:
        ratios = [a / b * samples[name] / samples[AS_IS] for a, b in zip(turns[AS_IS], turns[name], strict=True)]
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        low[name] = medians[50]
    return sorted((n for n in low if low[n] > 1.05), key=low.get, reverse=True)


def helps_and_its_median_is_enough(key):
    """A gain that is shown to be one, and a median of 1.05 or more."""

    def found(turns, samples):
        gains = {
            n: paired_ratio([t * samples[n] / samples[AS_IS] for t in turns[AS_IS]], turns[n])
            for n in turns
            if n != AS_IS
        }
        names = [n for n, gain in gains.items() if gain.low > 1 and gain.value >= 1.05]
        return sorted(names, key=lambda n: -getattr(gains[n], key))

    return found


@pytest.mark.parametrize("right", [worth_it, with_own_bootstrap])
def test_right_answers_of_any_style_pass(right):
    check_worth_it(right)


@pytest.mark.parametrize("name", first(3, MUTANTS["12.2"]))
def test_mistakes_are_named(name):
    wrong, words = MUTANTS["12.2"][name]
    with pytest.raises(Mistake) as found:
        check_worth_it(wrong)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (by_name, "not surely worth it|leave it out"),
        (lambda t, s: sorted(worth_it(t, s)), "right names, in another order|upside down|by the median"),
        (lambda t, s: set(worth_it(t, s)), "not a list of names"),
        (lambda t, s: [(n, 1.0) for n in worth_it(t, s)], "none of the names"),
        (lambda t, s: [[n] for n in worth_it(t, s)], "none of the names"),
        (lambda t, s: frozenset(worth_it(t, s)), "not a list of names"),
        (helps_and_its_median_is_enough(key="low"), "shows that it helps, and not that it is"),
        (helps_and_its_median_is_enough(key="value"), "shows that it helps, and not that it is"),
        (lambda t, s: worth_it(t, s)[:2], "leave it out"),
        (lambda t, s: worth_it(t, s) * 2, "twice"),
    ],
)
def test_other_answers_are_told_what_is_wrong_and_never_the_answer(wrong, words):
    with pytest.raises(Mistake, match=words) as found:
        check_worth_it(wrong)
    assert str(worth_it(*case(SEEDS[0]))) not in str(found.value)


def test_what_is_worth_it_is_clear_in_every_made_run_and_not_always_the_same():
    """The lower ends are apart from each other, and from the limit, by more than a bootstrap's own noise."""
    answers = set()
    for seed in SEEDS:
        turns, samples = case(seed)
        low = {
            n: paired_ratio([samples[n] / samples[AS_IS] * t for t in turns[AS_IS]], turns[n]).low
            for n in turns
            if n != AS_IS
        }
        ends = sorted([1.05, *(end for end in low.values() if end > 1)])
        assert min(b / a for a, b in itertools.pairwise(ends)) > 1.01, (seed, low)
        answers.add(tuple(worth_it(turns, samples)))
    assert {len(a) for a in answers} == {3} and len(answers) > 4
