"""Where an effect is planted, a careless benchmark misses the truth and the honest one finds it."""

import itertools
from types import SimpleNamespace

import psutil
import pytest
import torch

from labs import fooled as lab
from labs.kit import measure
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records


class Clock:
    """A clock that only moves when a step runs."""

    def __init__(self):
        self.now = 0.0

    def costs(self, *seconds):
        """Return a step that takes these seconds, again and again."""
        each = itertools.cycle(seconds)
        return lambda *_: self.spend(next(each))

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(lab.time, "perf_counter", lambda: made.now)
    return made


def rank(number=0, gather=list):
    return SimpleNamespace(
        device=torch.device("cpu"), rank=number, world_size=2, slowest=list, barrier=lambda: None, gather=gather
    )


def test_a_debug_switch_in_the_baseline_is_no_speedup_of_ours(clock, monkeypatch):
    def step():
        clock.spend(3.0 if torch.is_anomaly_enabled() else 1.0)

    monkeypatch.setattr(lab, "training", lambda *_, **__: step)
    assert lab.debug_baseline(lab.Config(), rank())(0) == (3.0, 1.0) and not torch.is_anomaly_enabled()


def test_padding_counts_as_tokens_and_not_as_words(clock, monkeypatch):
    monkeypatch.setattr(lab, "next_word_training", lambda *_: lambda batch: clock.spend(batch.numel()))
    reported, honest = lab.two_units(lab.Config(), rank())(0)
    assert reported == pytest.approx(1.0) and honest > 1.5


def test_a_batch_that_grows_with_the_ranks_looks_like_a_speedup(clock, monkeypatch):
    seconds = {(256, False): 1.0, (256, True): 1.25, (128, True): 1.0}
    monkeypatch.setattr(lab, "training", lambda batch, *_, ddp=False: clock.costs(seconds[batch, ddp]))
    assert lab.weak_as_strong(lab.Config(), rank())(0) == (pytest.approx(1.6), pytest.approx(1.0))


def test_samples_per_second_are_not_the_time_to_a_loss(monkeypatch):
    done = {32: (1000, 1.0), 1024: (16000, 2.0)}
    monkeypatch.setattr(lab, "train_to_loss", lambda batch, *_: done.get(batch))
    assert lab.samples_rate(lab.Config(), rank())(0) == (8.0, 0.5)


def test_the_clock_of_a_rank_with_little_work_is_not_the_job_s(clock, monkeypatch):
    """Rank 1 takes twice as long: 12 steps alone, 4 and 8 of them shared."""
    monkeypatch.setattr(lab, "training", lambda *_, **__: clock.costs(1.0))
    once = lab.one_clock(lab.Config(), rank(gather=lambda mine: [mine, 2 * mine]))
    assert once(0) == (pytest.approx(3.0), pytest.approx(1.5))


def test_half_the_bytes_of_a_small_message_save_nothing(clock, monkeypatch):
    monkeypatch.setattr(lab.dist, "all_reduce", lambda t: clock.spend(0.001 + t.numel() / 1e9))
    reported, honest = lab.other_size(lab.Config(), rank())(0)
    assert reported == pytest.approx(1.0, abs=0.01) and honest == pytest.approx(11.01 / 6.005)


def test_a_way_fools_only_if_a_run_shows_it():
    sure, even = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95], [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]
    records = [
        Record("fooled", "speedup", "x", tuple(samples), case={"way": way, "benchmark": benchmark})
        for way, reported in (("two_units", sure), ("one_clock", even))
        for benchmark, samples in (("reported", reported), ("honest", even[::-1]))
    ]
    assert lab.category(Records(records)) == "two_units"


def test_an_unknown_way_is_named():
    with pytest.raises(BadInput, match="ways: there is no 'two_unit': did you mean"):
        lab.Config(ways=("two_unit",))


def test_a_neighbour_ends_with_its_block_also_after_an_error():
    def neighbours():
        return [p for p in psutil.Process().children(recursive=True) if lab.BUSY in p.cmdline()]

    with pytest.raises(KeyError), lab.busy_neighbour():
        assert len(neighbours()) == 1
        raise KeyError
    assert not neighbours()


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_runs(ranks):
    run = launch("fooled", ranks, smoke=True, oversubscribe=True)
    ways = set(lab.WAYS) - (set(lab.WITH_TWO_RANKS) if ranks == 1 else set())
    assert {(r.case["way"], r.case["benchmark"]) for r in run} == set(itertools.product(ways, ("reported", "honest")))
    assert all(len(r.samples) == 2 and min(r.samples) > 0 for r in run)
