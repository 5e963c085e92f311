"""Timing and statistics: intervals that hold what they promise, warm-up, pairs, and how numbers are written."""

import itertools
import math
import random
import statistics
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from labs.kit import measure
from labs.kit.errors import BadInput
from labs.kit.launch import run_on_ranks
from labs.kit.measure import (
    Budget,
    Estimate,
    WarmUp,
    differs,
    estimate,
    interleave,
    orders,
    paired_ratio,
    require_budget,
    rounds_of,
    steady_from,
    warm_up,
)

CPU = torch.device("cpu")


def noise(n, seed, scale=1.0):
    """Step times as they are: a floor, and now and then something that takes longer."""
    draw = random.Random(seed)
    return [scale * (1.0 + draw.expovariate(30)) for _ in range(n)]


def test_a_a_differs_rarely_and_15_percent_is_found():
    n, rounds = 8, 120
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


@pytest.mark.parametrize("n", [7, 20])
def test_a_95_percent_interval_holds_the_median_in_95_percent_of_all_cases(n):
    rounds = 400
    draw = random.Random(n)

    def ratios():
        return [(1 + draw.expovariate(30)) / (1 + draw.expovariate(30)) for _ in range(n)]

    missed = sum(differs(estimate(ratios(), resamples=299)) for _ in range(rounds))
    assert missed / rounds <= 0.08, "5 % are promised; a plain percentile interval of 7 samples misses 12 %"
    assert missed / rounds >= 0.01, "an interval that always holds it is too wide to find anything"


@given(st.floats(1e-6, 1e9), st.integers(4, 7))
@example(0.0072254277208884, 6)
@example(93712.68442154698, 5)
def test_an_interval_holds_its_value_where_samples_repeat(often, times):
    """On a straight line between two equal numbers rounding may leave the last digit."""
    samples = [often] * times + [1.01 * often]
    found = estimate(samples, resamples=299)
    assert often == found.low == found.value <= found.high <= 1.01 * often


def test_a_mean_has_the_interval_of_students_t():
    from scipy.stats import t

    samples = noise(6, 4)
    found, exact = measure.mean(samples, "s"), t.interval(0.95, 5, np.mean(samples), np.std(samples, ddof=1) / 6**0.5)
    assert (found.value, found.n, found.unit) == (pytest.approx(np.mean(samples)), 6, "s")
    assert found.high - found.value == pytest.approx(2.5706 * np.std(samples, ddof=1) / 6**0.5, rel=1e-4)
    assert (found.low, found.high) == pytest.approx(exact)
    one = measure.mean([2.0])
    assert (one.low, one.value, one.high) == (2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="at least one"):
        measure.mean([])


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


@pytest.mark.parametrize(
    ("value", "low", "high", "unit", "text"),
    [
        (0.01234, 0.01211, 0.01294, "s", "12.3 ms [12.1, 12.9]"),
        (3.1e-8, 2.9e-8, 3.44e-8, "1", "3.1e-08 [2.9e-08, 3.4e-08]"),
        (378152, 378152, 378152, "B", "378 kB [378, 378]"),
        (1.2e12, 1e12, 1.3e12, "FLOP/s", "1.20 TFLOP/s [1.00, 1.30]"),
        (1, 0, math.inf, "x", "1.00 x [0.00, inf]"),
    ],
)
def test_how_an_estimate_is_written(value, low, high, unit, text):
    assert str(Estimate(value, low, high, 5, unit)) == text


TRACES = {  # seconds of step i, without noise; the first steady step of 40, None if there is none
    "steady from the start": (lambda i: 1.0, 0),
    "a slow first call": (lambda i: 50.0 if i == 0 else 1.0, 1),
    "faster from step 7": (lambda i: 3.0 if i < 7 else 1.0, 7),
    "slower from step 21": (lambda i: 1.0 if i < 21 else 1.5, 21),
    "decay to a plateau": (lambda i: 1.0 + 4.0 * math.exp(-i / 5), 19),  # 4 exp(-i / 5) < 0.1 from i = 19
    "every second takes longer": (lambda i: 3.0 if i % 2 else 1.0, 0),
    "grows for ever": (lambda i: 1.0 + 0.05 * i, None),
}


@pytest.mark.parametrize("name", TRACES)
def test_the_first_steady_step_is_found_in_noise_with_outliers_too(name):
    trace, first = TRACES[name]
    assert steady_from([trace(i) for i in range(40)]) == first
    found = []
    for seed in range(60):
        draw = random.Random(seed)
        seconds = [trace(i) * draw.gauss(1, 0.05) * (3.0 if draw.random() < 0.05 else 1.0) for i in range(40)]
        found.append(steady_from(seconds))
    right = [f is None if first is None else f is not None and abs(f - first) <= 4 for f in found]
    assert sum(right) >= 48, found


@pytest.fixture
def traced(monkeypatch):
    """Give every step the duration that a trace holds for it."""

    def give(trace):
        seconds = (trace(i) for i in itertools.count())
        monkeypatch.setattr(measure, "time_steps", lambda step, n, device: [next(seconds) for _ in range(n)])

    return give


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("steady from the start", 12),
        ("faster from step 7", 21),
        ("every second takes longer", 12),
    ],
)
def test_warm_up_ends_when_steps_are_steady(traced, name, steps):
    trace, _ = TRACES[name]
    traced(trace)
    warm = warm_up(lambda: None, CPU)
    assert warm == WarmUp(tuple(trace(i) for i in range(steps)), settled=True)
    assert warm.steps == steps and str(warm) == f"steady after {steps} steps"


def test_warm_up_says_that_it_gave_up_at_the_limit(traced):
    traced(TRACES["grows for ever"][0])
    warm = warm_up(lambda: None, CPU, max_steps=20)
    assert warm.steps == 20 and not warm.settled
    assert str(warm) == "not steady within 20 steps: the last 10 steps were 41 % slower than the first"


def test_ranks_warm_up_for_equally_many_steps():
    def steps():
        import torch
        import torch.distributed as dist

        from labs.kit import measure

        def agree(opinion):
            votes = [None, None]
            dist.all_gather_object(votes, opinion)
            return all(votes)

        seconds = iter([8.0] * 7 + [1.0] * 99 if dist.get_rank() else [1.0] * 99)
        measure.time_steps = lambda step, n, device: [next(seconds) for _ in range(n)]
        warm = measure.warm_up(lambda: None, torch.device("cpu"), max_steps=100, agree=agree)
        return warm.steps, warm.settled

    assert run_on_ranks(steps) == [(21, True)] * 2


def test_interleaving_takes_turns():
    order, done = [], []
    seconds = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        3,
        CPU,
        inner=2,
        between=lambda: order.append("|"),
        on_round=lambda *told: done.append(told),
        seed=None,
    )
    assert "".join(order) == "|aa|bb" * 3 and done == [(1, 3), (2, 3), (3, 3)]
    assert {name: len(s) for name, s in seconds.items()} == {"a": 3, "b": 3}


def test_interleaving_draws_the_order_of_every_round():
    called = []
    steps = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = interleave(steps, 7, CPU, seed=3)
    assert called == [name for order in orders("abc", 7, 3) for name in order] != list("abc") * 7
    assert list(seconds) == ["a", "b", "c"] and {len(s) for s in seconds.values()} == {7}
    assert interleave({}, 3, CPU) == {}


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_every_side_has_every_place_and_every_predecessor_equally_often(n):
    names = "abcdef"[:n]
    rounds = list(orders(names, 2 * n))
    assert all(sorted(r) == list(names) for r in rounds)
    for start in (0, n):
        for place in range(n):
            assert Counter(r[place] for r in rounds[start : start + n]) == dict.fromkeys(names, 1)
    pairs = Counter(pair for r in rounds for pair in itertools.pairwise(r))
    assert set(pairs) == set(itertools.permutations(names, 2)) and set(pairs.values()) <= {2}


def test_a_side_that_suffers_from_its_predecessor_is_not_taken_for_slow(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    draw, before = random.Random(1), [""]

    def step(name):
        clock[0] += draw.gauss(1, 0.01) + (0.2 if before[0] == "a" else 0.0)  # "a" leaves something behind
        before[0] = name

    steps = {name: lambda name=name: step(name) for name in "abc"}
    fixed, drawn = (interleave(steps, 60, CPU, seed=seed) for seed in (None, 0))
    assert differs(paired_ratio(fixed["b"], fixed["c"])) and not differs(paired_ratio(drawn["b"], drawn["c"]))


def test_a_proportion_has_an_interval_even_at_its_ends():
    none, half = measure.proportion(0, 100), measure.proportion(50, 100)
    assert (none.value, none.low) == (0, 0) and none.high == pytest.approx(0.037, abs=1e-3)
    assert (half.value, half.n) == (0.5, 100) and half.low == pytest.approx(0.404, abs=1e-3)
    with pytest.raises(ValueError):
        measure.proportion(0, 0)


class Clock(threading.local):
    """Seconds of each thread's own clock."""

    now = 0.0


def ranks_in_turn(speeds, seconds, names="ab"):
    """Rounds that each of several ranks, as threads with a clock of their own, takes within a budget; and its clock."""
    clock, told, barrier = Clock(), [0.0] * len(speeds), threading.Barrier(len(speeds), timeout=20)
    found = [None] * len(speeds)

    def work(rank):
        def slowest(mine):
            told[rank] = mine[0]
            barrier.wait()
            most = max(told)
            barrier.wait()
            return [most]

        def step():
            clock.now += speeds[rank]

        taken = interleave(dict.fromkeys(names, step), Budget(seconds, slowest), CPU)
        found[rank] = {len(s) for s in taken.values()}, clock.now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.time, "perf_counter", lambda: clock.now)
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(speeds))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
    return found


@given(speeds=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=3), seconds=st.floats(0.01, 50), n=st.integers(1, 7))
def test_a_budget_gives_all_ranks_the_rounds_that_the_slowest_has_time_for(speeds, seconds, n):
    found = ranks_in_turn(speeds, seconds, "abcdefg"[:n])
    [rounds] = {frozenset(counts) for counts, _ in found}
    [rounds] = rounds
    assert measure.LEAST_ROUNDS <= rounds <= measure.MOST_ROUNDS
    assert n not in (1, 2, 3, 6) or rounds % n == 0, "each side had each place equally often"
    slowest_s = max(now for _, now in found)
    assert rounds == measure.LEAST_ROUNDS or slowest_s <= seconds * (1 + 1e-9)
    another_s = slowest_s / rounds * (rounds + (n if n in (1, 2, 3, 6) else 1))
    assert rounds == measure.MOST_ROUNDS or another_s > seconds * (1 - 1e-9), "no time is left unused"


def test_real_ranks_of_different_speed_take_equally_many_rounds():
    def rounds():
        import time

        import torch
        import torch.distributed as dist

        from labs.kit.measure import Budget, interleave

        def slowest(seconds):
            worst = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            return worst.tolist()

        steps = {name: lambda: time.sleep(0.001 + 0.01 * dist.get_rank()) for name in "ab"}
        return [len(s) for s in interleave(steps, Budget(0.5, slowest), torch.device("cpu")).values()]

    mine, yours = run_on_ranks(rounds)
    assert mine == yours and mine[0] == mine[1] >= 6 and mine[0] % 2 == 0


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return now


def test_a_machine_three_times_slower_takes_no_longer_and_its_intervals_are_wider(clock):
    def compared(slower, seed):
        draw, clock[0] = random.Random(seed), 0.0

        def step(mean_s):
            clock[0] += slower * mean_s * (1 + draw.expovariate(10))

        taken = interleave({"a": lambda: step(0.01), "b": lambda: step(0.012)}, Budget(1.2), CPU)
        assert clock[0] <= 1.05 * 1.2, "no more than a last round that took longer than those before it"
        return paired_ratio(taken["b"], taken["a"], resamples=999)

    quick, slow = ([compared(slower, seed) for seed in range(20)] for slower in (1, 3))
    assert min(q.n for q in quick) > 2.5 * max(s.n for s in slow) > 2.5 * 6
    wide, narrow = (statistics.median(e.high - e.low for e in found) for found in (slow, quick))
    assert wide > 1.3 * narrow, "a third of the samples: about the root of 3 times as wide"
    assert compared(3, 0).value == slow[0].value, "nothing else is drawn"


def test_a_machine_that_slows_down_on_the_way_ends_in_time_all_the_same(clock):
    calls = []

    def step():
        calls.append(1)
        clock[0] += 0.01 if len(calls) < 40 else 0.1

    assert len(interleave({"a": step}, Budget(2.0), CPU)["a"]) == len(calls) < 60 and clock[0] <= 2


def test_a_budget_tells_how_many_rounds_to_expect(clock):
    told = []

    def step():
        clock[0] += 0.125

    interleave({"a": step, "b": step}, Budget(2.5), CPU, on_round=lambda *so_far: told.append(so_far))
    assert [done for done, _ in told] == list(range(1, 11)) and told[-1] == (10, 10)
    assert all(total == 10 for _, total in told)
    assert len(interleave({"a": step}, 3, CPU)["a"]) == 3, "a fixed number of rounds is taken as it is"


@pytest.mark.parametrize("seconds", [0, float("nan")])
def test_a_budget_that_is_no_time_is_refused_in_one_line(seconds):
    with pytest.raises(BadInput, match=r"^seconds must be a positive number, not"):
        require_budget(seconds, None)


def test_too_few_rounds_are_refused_in_one_line():
    require_budget(1.0, 2, least=2)
    with pytest.raises(BadInput, match=r"^rounds must be at least 1, not 0$"):
        require_budget(1.0, 0)
    with pytest.raises(BadInput, match=r"^rounds must be at least 2, not 1: one sample has no interval$"):
        require_budget(1.0, 1, least=2)


@pytest.mark.parametrize("config, rounds", [({"smoke": True, "rounds": 9}, 2), ({"rounds": 9}, 9), ({}, Budget(1.5))])
def test_fixed_rounds_win_over_seconds_and_a_smoke_run_over_both(config, rounds):
    given = SimpleNamespace(**{"smoke": False, "rounds": None, "seconds": 3.0} | config)
    assert rounds_of(given, part=0.5) == rounds
