"""Exercise 12.2: right answers with other intervals pass, mistakes have their name on every made run."""

from __future__ import annotations

import random
import statistics

import pytest
from mutants.nb12_first_cure import MUTANTS

from labs.chapters.nb12.exercise_first_cure import AS_IS, SEEDS, case, check_worth_it, worth_it
from labs.kit.check import Mistake


def with_own_bootstrap(turns, samples):
    """Plain percentiles of resampled medians."""
    draw, low = random.Random(5), {}
    for name in turns:
        ratios = [a / b * samples[name] / samples[AS_IS] for a, b in zip(turns[AS_IS], turns[name], strict=True)]
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        low[name] = medians[50]
    return sorted((n for n in low if low[n] > 1.05), key=low.get, reverse=True)


@pytest.mark.parametrize("right", [worth_it, with_own_bootstrap])
def test_right_answers_of_any_style_pass(right):
    check_worth_it(right)


@pytest.mark.parametrize("name", MUTANTS["12.2"])
def test_mistakes_are_named(name):
    wrong, words = MUTANTS["12.2"][name]
    with pytest.raises(Mistake) as found:
        check_worth_it(wrong)
    assert words in str(found.value)


def test_what_is_worth_it_is_clear_in_every_made_run():
    for seed in SEEDS:
        assert worth_it(*case(seed)) == ["same batch again", "larger batch", "no exchange"]
