"""Timing and statistics: intervals that hold what they promise, warm-up, pairs, and how numbers are written."""

import random

import pytest
import torch

from labs.kit import measure
from labs.kit.launch import run_on_ranks
from labs.kit.measure import Estimate, differs, estimate, interleave, is_steady, paired_ratio, time_steps, warm_up

CPU = torch.device("cpu")


def noise(n, seed, scale=1.0):
    """Step times as they are: a floor, and now and then something that takes longer."""
    draw = random.Random(seed)
    return [scale * (1.0 + draw.expovariate(30)) for _ in range(n)]


@pytest.mark.parametrize("n", [8, 16])
def test_a_a_differs_rarely_and_15_percent_is_found(n):
    rounds = 120
    same = sum(differs(paired_ratio(noise(n, i), noise(n, i + 1000))) for i in range(rounds))
    slower = sum(differs(paired_ratio(noise(n, i, 1.15), noise(n, i + 1000))) for i in range(rounds))
    assert same / rounds <= 0.15, "an A/A test must rarely show a difference"
    assert slower / rounds >= 0.9


def test_pairs_cancel_a_slow_spell_of_the_machine():
    spell = [1.0] * 10 + [3.0] * 10
    a, b = ([s * x for s, x in zip(spell, noise(20, seed), strict=True)] for seed in (1, 2))
    ratio = paired_ratio([1.2 * x for x in a], b)
    assert ratio.low > 1.1 and ratio.high < 1.3 and ratio.n == 20
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="other than 0"):
        paired_ratio([1.0], [0.0])


def test_estimates_are_medians_with_an_interval_and_the_same_every_time():
    samples = noise(15, 3)
    found = estimate(samples, "s")
    assert found == estimate(samples, "s") and found.n == 15
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert found.value == sorted(samples)[7]
    assert estimate([2.0]) == Estimate(2.0, 2.0, 2.0, 1) and estimate([2.0, 2.0]).low == 2.0
    assert estimate(noise(3000, 1)).n == 3000
    with pytest.raises(ValueError, match="at least one"):
        estimate([])


def test_the_verdict_says_when_nothing_can_be_said():
    assert "no difference that this run can show" in measure.verdict(
        Estimate(1.01, 0.98, 1.03, 9, "x"), "pinned memory"
    )
    assert measure.verdict(Estimate(1.2, 1.1, 1.3, 9, "x"), "DDP") == "DDP: 1.20 x [1.10, 1.30]"
    assert differs(Estimate(2, 1.9, 2.1, 9), null=1.8) and not differs(Estimate(2, 1.9, 2.1, 9), null=2.0)


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "text"),
    [
        (0.01234, 0.01211, 0.01294, "s", "12.3 ms [12.1, 12.9]"),
        (1.76, 1.7, 1.812, "x", "1.76 x [1.70, 1.81]"),
        (3.1e-8, 2.9e-8, 3.44e-8, "1", "3.1e-08 [2.9e-08, 3.4e-08]"),
        (378152, 378152, 378152, "B", "378 kB [378, 378]"),
        (1.2e12, 1e12, 1.3e12, "FLOP/s", "1.20 TFLOP/s [1.00, 1.30]"),
        (2, 2, 2, "steps", "2 steps [2, 2]"),
        (0, 0, 0, "s", "0 s [0, 0]"),
        (0.5, 0.5, 0.5, "B", "0.500 B [0.500, 0.500]"),
        (0.05, 0.04, 0.061, "x", "0.0500 x [0.0400, 0.0610]"),
        (-3.2, -4, -1, "%", "-3.20 % [-4.00, -1.00]"),
    ],
)
def test_how_an_estimate_is_written(value, low, high, unit, text):
    assert str(Estimate(value, low, high, 5, unit)) == text


def test_scaling_an_estimate():
    assert str(Estimate(2.0, 1.0, 3.0, 5, "s").scaled(0.5, "x")) == "1.00 x [0.50, 1.50]"


def test_warm_up_ends_when_steps_are_steady(monkeypatch):
    seconds = iter([5.0, 4.0, 3.0, 2.0, 1.0] + [1.0] * 100)
    monkeypatch.setattr(measure, "time_steps", lambda step, n, device: [next(seconds) for _ in range(n)])
    assert len(warm_up(lambda: None, CPU)) == 15
    assert is_steady([1.0] * 10) and not is_steady([1.0] * 9) and not is_steady([2.0] * 5 + [1.0] * 5)


def test_warm_up_gives_up_at_the_limit(monkeypatch):
    double = (2.0**i for i in range(1000))
    monkeypatch.setattr(measure, "time_steps", lambda step, n, device: [next(double) for _ in range(n)])
    assert len(warm_up(lambda: None, CPU, max_steps=12)) == 12


def test_ranks_warm_up_for_equally_many_steps():
    def steps():
        import torch
        import torch.distributed as dist

        from labs.kit import measure

        def agree(opinion):
            votes = [None, None]
            dist.all_gather_object(votes, opinion)
            return all(votes)

        late = iter([1.0, 8.0, 1.0, 8.0, 1.0, 8.0] + [1.0] * 99 if dist.get_rank() else [1.0] * 99)
        measure.time_steps = lambda step, n, device: [next(late)] * n
        return len(measure.warm_up(lambda: None, torch.device("cpu"), max_steps=100, agree=agree))

    assert run_on_ranks(steps) == [40, 40]


def test_every_step_is_timed_once():
    calls = []
    seconds = time_steps(lambda: calls.append(1), 7, CPU)
    assert len(seconds) == len(calls) == 7 and all(s >= 0 for s in seconds)


def test_interleaving_takes_turns():
    order, done = [], []
    seconds = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3, CPU,
        inner=2, between=lambda: order.append("|"), on_round=done.append,
    )  # fmt: skip
    assert "".join(order) == "|aa|bb" * 3 and done == [1, 2, 3]
    assert {name: len(s) for name, s in seconds.items()} == {"a": 3, "b": 3}
