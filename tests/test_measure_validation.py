"""Counts are right where the truth is known, and the neighbour's process arrives, leaves and ends."""

import contextlib
import multiprocessing
import random

import pytest
import torch

from labs import measure_validation as lab
from labs.kit import measure
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


def samples(n, seed, slower=0.0, scatter=0.03):
    """Times of a step on a machine whose speed wanders, with pairs that scatter by `scatter`."""
    draw = random.Random(seed)
    return [(1 + slower) * draw.gauss(1, scatter / 2**0.5) * (1.0 if i % 50 < 30 else 1.8) for i in range(n)]


def test_what_is_planted_is_found_and_nothing_else():
    a = samples(800, 0)
    found = {
        slower: sum(ratio.low > 1 for ratio in lab.comparisons(a, samples(800, 9, slower), 20))
        for slower in (0.0, 0.05, 0.1)
    }
    assert found[0.0] <= 4 and found[0.05] >= 36 and found[0.1] == 40


def detected(**shares):
    """`found` records of 60 comparisons, by pairs: n20=0.9."""
    return Records(
        Record("measure_validation", "found", "1", [float(i < 60 * share) for i in range(60)],
               case={"arm": "+5 %", "pairs": int(name[1:])})
        for name, share in shares.items()
    )  # fmt: skip


def test_pairs_are_enough_if_the_low_end_of_the_share_says_so():
    assert lab.fewest_pairs(detected(n10=0.6, n20=0.85, n40=0.95)) == 40  # 51 of 60: 74 to 92 %
    assert lab.fewest_pairs(detected(n10=0.6, n20=0.7)) is None


def test_a_neighbour_fools_blocks_and_not_turns(monkeypatch):
    clock, here = [0.0], []

    def work(k):
        clock[0] += k * (2.0 if here else 1.0)

    @contextlib.contextmanager
    def neighbour_on(device):
        yield lambda: here.append(True), here.clear

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(lab, "work_of", lambda unit_s, device: work)
    monkeypatch.setattr(lab, "neighbour_on", neighbour_on)
    rank = Rank(0, 1, 0, 1, CPU, "gloo", (), lab="measure_validation")
    records = Records(lab.neighbour(lab.Config(rounds=12), rank))
    found = {(r.case["order"], r.case["side"]): r.samples for r in records}
    alone, crowded = (100.0,) * 6, (200.0,) * 6
    assert found["one after the other", "A"] == alone + alone
    assert found["one after the other", "B"] == crowded + crowded
    assert found["in turn", "A"] == found["in turn", "B"] == alone + crowded
    assert [ratio.value for ratio in lab.same_code(records).values()] == [2, 1]


def test_a_neighbour_always_ends():
    with pytest.raises(KeyError), lab.neighbour_on(CPU) as (arrive, _):
        arrive()
        assert len(multiprocessing.active_children()) == 1
        raise KeyError
    assert not multiprocessing.active_children()


def test_every_part_is_there():
    run = launch("measure_validation", nproc=2, oversubscribe=True, smoke=True)
    assert [(r.case["arm"], len(r.samples)) for r in run.where("step_s", part="planted")] == [
        (arm, 40) for arm in lab.ARMS
    ]
    assert [len(run.one("found", arm="+5 %", pairs=pairs).samples) for pairs in lab.PAIRS] == [8, 4, 2, 1]
    for order in lab.ORDERS:
        assert [len(run.one("step_s", order=order, side=s).samples) for s in "AB"] == [6, 6]


@pytest.mark.parametrize(("name", "value"), [("step_ms", float("nan")), ("parts", ("plant",)), ("rounds", 3)])
def test_bad_input(name, value):
    with pytest.raises(BadInput, match=name):
        launch("measure_validation", nproc=1, **{name: value})
