"""The counts are right where the truth is known, and every part of the lab runs and ends its neighbour."""

import contextlib
import random
import threading

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


def planted(n=800, scatter=0.03):
    """Records as the lab makes them."""
    return Records(
        Record(
            "measure_validation",
            "step_s",
            "s",
            samples(n, seed, more / lab.UNITS, scatter),
            case={"part": "planted", "arm": arm, "slower": more / lab.UNITS},
        )
        for seed, (arm, more) in enumerate(lab.ARMS.items())
    )


def test_what_is_planted_is_found_and_nothing_else():
    rounds = 800
    a = samples(rounds, 0)
    found = {
        slower: sum(ratio.low > 1 for ratio in lab.comparisons(a, samples(rounds, 9, slower), 20, resamples=999))
        for slower in (0.0, 0.05, 0.1)
    }
    assert found[0.0] <= 4 and found[0.05] >= 36 and found[0.1] == 40


def test_power_grows_with_pairs_and_with_the_difference():
    rows = lab.power(planted(), (5, 10, 20, 40))
    share = {(r["arm"], r["pairs"]): r["share"] for r in rows}
    assert len(rows) == len(share) == 16 and {r["slower"] for r in rows if r["arm"] == "+2 %"} == {0.02}
    assert {p: share["+5 %", p].n for p in (5, 10, 20, 40)} == {5: 160, 10: 80, 20: 40, 40: 20}
    assert share["+2 %", 5].value < share["+2 %", 20].value < share["+10 %", 20].value == 1.0
    assert share["+2 %", 10].value < share["+5 %", 10].value
    assert all(share["A again", p].value <= 0.12 for p in (5, 10, 20, 40)), "false alarms"
    assert all(0 <= s.low <= s.value <= s.high <= 1 for s in share.values())
    certain = share["+10 %", 20]
    assert certain.low == pytest.approx(40 / (40 + 1.96**2), abs=1e-3), "Wilson's interval of 40 of 40"


def test_an_interval_of_the_wrong_sign_has_found_no_slowdown():
    records = Records(
        Record(
            "measure_validation",
            "step_s",
            "s",
            samples(400, seed, slower),
            case={"part": "planted", "arm": arm, "slower": planted_},
        )
        for seed, (arm, slower, planted_) in enumerate((("A", 0, 0), ("A again", -0.1, 0), ("+10 %", -0.1, 0.1)))
    )
    assert {r["arm"]: r["share"].value for r in lab.power(records, (20,))} == {"A again": 1.0, "+10 %": 0.0}


def test_predicted_pairs_follow_noise_and_slowdown():
    assert lab.predict(0.1, 0.1) == 17  # pi / 2 (1.960 + 1.282)^2 = 16.5
    assert lab.predict(0.03, 0.05) < lab.predict(0.06, 0.05) < lab.predict(0.06, 0.02)


def test_a_neighbour_moves_in_when_asked_and_always_ends():
    def neighbours():
        return [t for t in threading.enumerate() if t.name == "neighbour"]

    with lab.neighbour_on(CPU):
        assert not neighbours()
    with pytest.raises(KeyError), lab.neighbour_on(CPU) as move_in:
        move_in()
        assert len(neighbours()) == 1
        raise KeyError
    assert not neighbours()


def test_the_neighbour_fools_whoever_measures_one_after_the_other(monkeypatch):
    clock, moved_in = [0.0], []

    def work(k):
        clock[0] += k * (2.0 if moved_in else 1.0)

    @contextlib.contextmanager
    def neighbour_on(device):
        yield lambda: moved_in.append(True)
        moved_in.clear()

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(lab, "work_of", lambda unit_s, device: work)
    monkeypatch.setattr(lab, "neighbour_on", neighbour_on)
    rank = Rank(0, 1, 0, 1, CPU, "gloo", (), lab="measure_validation")
    found = {tuple(r.case.values())[1:]: r.samples for r in lab.neighbour(lab.Config(pairs=6), rank)}
    alone, crowded = (100.0,) * 6, (200.0,) * 6
    assert found["one after the other", "A"] == alone + alone
    assert found["one after the other", "B"] == crowded + crowded
    assert found["in turn", "A"] == found["in turn", "B"] == alone + crowded


@pytest.fixture(scope="module")
def run():
    return launch("measure_validation", nproc=2, oversubscribe=True, smoke=True)


def test_every_part_is_there(run):
    assert [len(r.samples) for r in run.where("step_s", part="planted")] == [12] * 5
    assert {r.case["arm"]: r.case["slower"] for r in run.where("step_s", part="planted")} == {
        "A": 0.0,
        "A again": 0.0,
        "+2 %": 0.02,
        "+5 %": 0.05,
        "+10 %": 0.1,
    }
    counts = run.where("slowdowns_found") + run.where("intervals_with_1")
    assert [r.case["arm"] for r in counts] == ["+2 %", "+5 %", "+10 %", "A again"]
    assert all(0 <= r.value <= 2 and r.case["repetitions"] == 2 and r.case["pairs"] == 6 for r in counts)
    for order in ("one after the other", "in turn"):
        assert [len(run.one("step_s", order=order, side=s).samples) for s in "AB"] == [12, 12]
    assert {r.layout["rank"] for r in run} == {0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"repetitions": 0}, "repetitions must be at least 1, not 0"),
        ({"step_ms": float("nan")}, "step_ms must be between"),
        ({"parts": ("plant",)}, "parts may hold planted, neighbour, not plant"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("measure_validation", nproc=1, **values)
