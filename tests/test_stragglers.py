"""The slowest of n: expected maxima against dice, planted delays on real ranks, sentences that follow the records."""

from __future__ import annotations

import random

import numpy as np
import pytest

from labs import slowest_rank as lab
from labs.common.cost_model import waiting
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

DRAWS = 200_000


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_expected_maxima_are_those_of_dice(n):
    dice = np.random.default_rng(n)
    many = dice.exponential(3.0, (DRAWS // n + 2000, n)).max(axis=1).mean()
    assert waiting.of_exponential(3.0, n) == pytest.approx(many, rel=0.03)
    rare = 60 * (dice.random((DRAWS // n + 2000, n)) < 0.05).any(axis=1).mean()
    assert waiting.of_rare(0.05, 60, n) == pytest.approx(rare, rel=0.05)


def test_ends_of_the_formulas():
    assert waiting.of_exponential(3.0, 1) == 3.0 and waiting.of_exponential(1.0, 2) == 1.5
    assert waiting.of_rare(0.05, 60, 1) == pytest.approx(3.0) and waiting.of_rare(0.05, 60, 10**6) == pytest.approx(60)
    for wrong in (
        lambda: waiting.of_exponential(1, 0),
        lambda: waiting.of_rare(2, 1, 1),
    ):
        with pytest.raises(BadInput, match="at least one rank"):
            wrong()


def test_both_kinds_have_the_mean_that_was_asked_for():
    config, dice = lab.Config(), random.Random(0)
    for kind in lab.KINDS:
        drawn = [lab.draw_ms(config, kind, dice) for _ in range(40_000)]
        assert np.mean(drawn) == pytest.approx(config.mean_ms, rel=0.1)
        assert lab.predict(config, kind, 1) == pytest.approx(1e-3 * (config.work_ms + config.mean_ms))
    assert lab.predict(config, "rare", 8) > 1.5 * lab.predict(config, "exponential", 8)


def test_groups_are_powers_of_two_and_all():
    assert [lab.group_sizes(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"work_ms": -1.0}, "must not be negative"),
        ({"mean_ms": 0.0}, "must be positive"),
        ({"rare_share": 0.0}, "above 0"),
        ({"rare_share": 1.5}, "at most 1"),
        ({"seconds": 0.0}, "positive"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        lab.Config(**values)


def test_ranks_wait_for_the_longest_delay_that_was_planted():
    """No sleep ends early, so every measured step is at least what was planted: in any noise."""
    run = launch("slowest_rank", 4, oversubscribe=True, device="cpu", rounds=6, seconds=2.0)
    for kind in lab.KINDS:
        for n in (1, 2, 4):
            measured = next(r for r in run.where("step_s", delays=kind, ranks=n) if r.kind == "measured").samples
            planted = run.one("planted_s", delays=kind, ranks=n).samples
            assert len(measured) == len(planted) == 6
            assert all(m >= 0.99 * p for m, p in zip(measured, planted, strict=True)), (kind, n)
    again = launch("slowest_rank", 2, oversubscribe=True, device="cpu", rounds=6, seconds=2.0)
    for kind in lab.KINDS:
        two = [r.one("planted_s", delays=kind, ranks=2).samples for r in (run, again)]
        assert two[0] == two[1], "delays come from the seed, rank and group"


def records(rare):
    layout = {"world_size": 8, "rank": None, "backend": "gloo", "device": "cpu"}
    rows = []
    for kind, top in (("exponential", 0.013), ("rare", rare)):
        for ranks in (1, 8):
            s, case = 0.008 + (top - 0.008) * ranks / 8, {"delays": kind, "ranks": ranks}
            rows.append(Record("slowest_rank", "formula_s", "s", [s], "modelled", case, {}, layout))
            rows.append(Record("slowest_rank", "step_s", "s", [s + 0.001] * 6, "measured", case, {}, layout))
    return Records(rows)


@pytest.mark.parametrize(("rare", "word"), [(0.026, "rare"), (0.013, "inconclusive"), (0.009, "small")])
def test_the_longer_step_decides(rare, word):
    assert lab.category(records(rare)) == word
    assert "8 ranks take 14.0 ms" in next(lab.answer(records(rare)))
