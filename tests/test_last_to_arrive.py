"""A straggler that every rank's own timer acquits is convicted by its arrival; what it costs is foretold."""

import random
import statistics

import pytest
import torch
import torch.distributed as dist
from again import holds_soon

from labs import last_to_arrive as lab
from labs.common.profiling import late_training
from labs.common.timing import moments
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch, run_on_ranks
from labs.kit.record import Record, Records

LAYOUT = {"world_size": 2, "rank": None, "backend": "gloo", "device": "cpu"}
PROVENANCE = {"cpu": "a processor", "utc": "2026-11-23T00:00:00+00:00"}


def made(late_ms=30.0, ranks=2, n=40, last=1, jitter_ms=0.2, cost_ms=0.0, often=1.0, seed=0):
    """Records of a run in which the ranks' timers say the same and rank `last` comes late, `often` of the time."""
    draw, rows = random.Random(seed), []
    layout = LAYOUT | {"world_size": ranks}

    def add(metric, samples, kind="measured", **case):
        rows.append(
            Record("last_to_arrive", metric, "s", tuple(samples), kind, case, {"seconds": 1.0}, layout, PROVENANCE)
        )

    def around(ms):
        return [1e-3 * (ms + abs(draw.gauss(0, jitter_ms))) for _ in range(n)]

    add("planted_s", [1e-3 * late_ms], "modelled", of_rank=last, place="backward")
    for case, extra in (("nobody", 0.0), ("one rank", late_ms), ("any rank", late_ms * 0.36)):
        add("added_s", [1e-3 * extra], "modelled", late=case)
        add("drawn_s", [1e-3 * extra] * n, "modelled", late=case)
        add("step_s", around(40 + extra), late=case)
        came = []
        for _ in range(n):
            who = last if case == "one rank" and draw.random() < often else draw.randrange(ranks)
            came.append([1e-3 * (abs(draw.gauss(0, jitter_ms)) + (extra if r == who else 0)) for r in range(ranks)])
        for r in range(ranks):
            add("own_step_s", around(40 + extra), of_rank=r, late=case)
            for phase, ms in zip(late_training.PHASES, (3, 10, 26 + extra, 1), strict=True):
                add("own_s", around(ms), of_rank=r, late=case, phase=phase)
            add("late_s", [step[r] - min(step) for step in came], of_rank=r, late=case)
    add("cost_step_s", around(40), hook="plain")
    add("cost_step_s", around(40 + cost_ms), hook="noting")
    return Records(rows)


def test_the_prediction_is_the_expected_largest_delay():
    config = lab.Config(delay_ms=20.0, rare_share=0.1)
    assert lab.predict(config, "nobody", 4) == 0
    assert lab.predict(config, "one rank", 4) == pytest.approx(0.020)
    draw = random.Random(0)
    drawn = [max(0.02 * (draw.random() < 0.1) for _ in range(4)) for _ in range(40_000)]
    assert lab.predict(config, "any rank", 4) == pytest.approx(statistics.fmean(drawn), rel=0.03)


def test_arrivals_need_no_common_clock():
    """Waits on three clocks of any origin: the shortest wait came last."""
    assert lab.late_by([[5.0, 1.0], [3.0, 2.0], [4.5, 2.5]]) == [(0.0, 2.0, 0.5), (1.5, 0.5, 0.0)]


@pytest.mark.parametrize(("ranks", "last"), [(2, 0), (4, 2)])
def test_who_is_to_blame(ranks, last):
    run = made(ranks=ranks, last=last)
    found = lab.blame(run, "one rank")
    assert found.rank == last and found.clear and found.by.value == pytest.approx(0.030, abs=2e-3)
    assert not lab.blame(made(late_ms=0.0, ranks=ranks, seed=3), "one rank").clear
    assert lab.added(run, "one rank").value == pytest.approx(0.030, abs=1e-3)


def test_the_answer_says_what_the_records_can_tell():
    said = " ".join(lab.answer(made()))
    assert (
        "Arrivals name rank 1" in said and "no rank is singled out" in said and "nothing that this run can show" in said
    )
    assert "cannot tell for sure" in " ".join(lab.answer(made(late_ms=0.0, n=8)))
    assert "nothing that this run can show" in " ".join(lab.answer(made(cost_ms=2.0, n=2))), "two steps show nothing"
    assert "adds 1.98 ms" in " ".join(lab.answer(made(cost_ms=2.0)))


def found_and_timers_alike(run):
    """The planted rank, late by about the planted time, while own timers hide it: they differ far less than that."""
    [planted] = run.where("planted_s")
    found, own = lab.blame(run, "one rank"), lab.own_timers(run, "one rank", "backward")
    apart = abs(max(own.values()) - min(own.values()))
    return (
        found.clear
        and found.rank == planted.case["of_rank"]
        and 0.6 < found.by.value / planted.value < 1.6
        and apart < 0.3 * planted.value
    )


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (4, 1)])
def test_a_planted_straggler_is_convicted_on_real_ranks(ranks, seed):
    def again():
        return launch("last_to_arrive", ranks, oversubscribe=True, device="cpu", rounds=12, seed=seed)

    first = again()
    assert holds_soon(found_and_timers_alike, first, again)
    assert {r.case["of_rank"] for r in first.where("late_s")} == {*range(ranks)}
    assert len(list(lab.answer(first))) == 6


def averaged(_):
    """On a rank: gradients with DDP's own exchange and with the hook that notes, and how many notes there are."""
    found, waits = [], []
    for hook in ((), (lab.note_wait, waits)):
        workload = late_training.build(lab.Config(layer_ms=0.0, layers=3))
        training = late_training.Training(workload, 8, torch.device("cpu"), *hook)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            training.step({})
        found.append([p.grad.clone() for p in training.ddp.parameters()])
    return found, len(waits)


def test_noting_changes_no_gradient():
    ranks = run_on_ranks(averaged, 2, None)
    for (plain, noting), notes in ranks:
        assert notes == 3
        torch.testing.assert_close(plain, noting)
        torch.testing.assert_close(noting, ranks[0][0][1])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"place": "lunch"}, "place"),
        ({"delay_ms": -1.0}, "delay_ms"),
        ({"rare_share": 0.0}, "rare_share"),
        ({"late_rank": -1}, "late_rank"),
        ({"model": "nosuch"}, "nosuch"),
        ({"layers": 0}, "layers"),
    ],
)
def test_bad_values_name_their_option(values, said):
    for name in ("last_to_arrive", "rank_timeline"):
        if "rare_share" not in values or name == "last_to_arrive":
            with pytest.raises(BadInput, match=said):
                make_config(lab_module(name), values)


class FakeEvent:
    """An event of a GPU whose clock, in ms, goes on by 5 with each record."""

    clock_ms = 0.0

    def __init__(self, device, enable_timing):
        assert enable_timing, "events without timing have no elapsed_time"
        self.at_ms = None

    def record(self):
        FakeEvent.clock_ms += 5.0
        self.at_ms = FakeEvent.clock_ms

    def elapsed_time(self, end):
        """ms, as CUDA's events give them."""
        return end.at_ms - self.at_ms


def test_on_a_gpu_the_moments_are_events_and_seconds_come_from_their_ms(monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    device = torch.device("meta")  # any that is not the CPU
    first, second = moments.now(device), moments.now(device)
    assert isinstance(first, FakeEvent) and moments.seconds_between(first, second) == pytest.approx(0.005)
    assert isinstance(moments.now(torch.device("cpu")), float) and moments.seconds_between(1.0, 3.5) == 2.5
