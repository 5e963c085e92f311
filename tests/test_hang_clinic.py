"""Real ranks hang and crash; what they leave names rank, collective and line, and nothing else is left of them."""

import inspect

import pytest

from labs import hang_clinic as lab
from labs.hang_clinic.hangs import HANGS
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch
from labs.kit.record import Record, Records

LAYOUT = {"world_size": 2, "rank": 0, "backend": "gloo", "device": "cpu"}


def all_right(run, drills, times):
    """Every drill was named right each time, its cure ended well, and no process or file is left."""
    table = lab.counts(run)
    assert set(table) == set(drills)
    wrong = [
        (r.case["drill"], r.case["wrong"], r.case["said"])
        for r in run.where("evidence_s")
        if not all(x.value for x in run.where("right", drill=r.case["drill"], round=r.case["round"]))
    ]
    assert not wrong
    for row in table.values():
        assert {row[what] for what in lab.NAMED} == {(times, times)}
        assert row["cured"] == (times, times) and row["clean"][0] == row["clean"][1]
    assert sum(r.value for r in run.where("leftovers")) == 0
    return True


def test_two_drills_are_diagnosed_from_their_files_alone():
    """One whose rank ends by itself, and one whose rank is killed."""
    run = launch("hang_clinic", 2, device="cpu", oversubscribe=True, drills=lab.SMOKE["drills"])
    assert all_right(run, lab.SMOKE["drills"], 1)
    said = list(lab.answer(run))
    assert said[0].startswith("2 hangs and crashes in 2 ways") and "Nothing is left" in said[-1]


@pytest.mark.drill
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_drill_is_diagnosed_and_its_cure_ends_well(ranks):
    run = launch("hang_clinic", ranks, device="cpu", oversubscribe=True, drills=tuple(HANGS), seed=ranks, timeout_s=280)
    assert all_right(run, HANGS, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_times_in_a_row_with_other_ranks():
    run = launch("hang_clinic", 2, device="cpu", oversubscribe=True, examine=20, cures=False, timeout_s=3500)
    table = lab.counts(run)
    assert {row[what] for row in table.values() for what in lab.NAMED} == {(20, 20)}, list(lab.answer(run))
    assert sum(r.value for r in run.where("leftovers")) == 0
    assert {r.case["wrong"] for r in run.where("right")} == {0, 1}


@pytest.mark.drill
@pytest.mark.long
def test_what_torchs_own_checks_name():
    drills = ("skipped_collective", "wrong_shape", "deadlocked_p2p")
    run = launch("hang_clinic", 2, device="cpu", oversubscribe=True, drills=drills, detail=True, timeout_s=280)

    def says(tool, drill, what):
        return run.one("names", tool=tool, drill=drill, what=what).value == 1

    detail, monitored = lab.TOOLS
    assert says(detail, "wrong_shape", "collective") and not says(detail, "wrong_shape", "rank")
    assert not says(monitored, "wrong_shape", "anything"), "all ranks come to the barrier"
    assert says(detail, "wrong_shape", "both") and not says(detail, "skipped_collective", "both")
    assert not says(detail, "deadlocked_p2p", "anything") and says(detail, "deadlocked_p2p", "asked")
    assert not says(monitored, "deadlocked_p2p", "asked"), "it stands before collectives alone"
    assert "It singles out the right rank" in next(iter(lab.answer(run)))


@pytest.mark.parametrize("name", HANGS)
def test_a_program_marks_its_line_and_fits_a_cell(name):
    hang = HANGS[name]
    assert len(hang.lines) == 1 and hang.cure and hang.collective
    assert 5 <= len(inspect.getsource(hang.program).splitlines()) <= 20


def test_the_rank_is_drawn_anew_in_each_round():
    drawn = [lab.drawn(lab.Config(seed=3), "dead_peer", i, 4) for i in range(40)]
    assert set(drawn) == {0, 1, 2, 3} and drawn == [lab.drawn(lab.Config(seed=3), "dead_peer", i, 4) for i in range(40)]


def test_what_a_check_said_names_a_rank_only_if_it_singles_one_out():
    hang = HANGS["wrong_shape"]
    both = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "(OpType=ALLREDUCE, TensorShape=[4]), but Rank 1 is running collective: (OpType=ALLREDUCE, TensorShape=[3])"
    )
    shown = {"anything": True, "rank": False, "both": True, "collective": True}
    assert lab.named(lab.told(both), hang, 1, 2) == shown
    third = both.replace("Rank 0", "Rank 2") + ".Collectives differ in the following aspects: shapes: 4vs 3"
    assert lab.named(lab.told(f"{both}\n{third}"), hang, 1, 3) == shown | {"rank": True}, "two against one"
    assert not lab.named(lab.told(f"{both}\n{third}"), hang, 0, 3)["rank"]
    one = "[rank0]: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 2000 ms"
    late = {"anything": True, "rank": True, "both": False, "collective": False}
    assert lab.named(lab.told(one), hang, 1, 2) == late
    assert not lab.named(lab.told(one), hang, 0, 2)["rank"]
    other = "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
    assert lab.named(lab.told(f"{one}\n{other} Please check rank 0 logs for faulty rank."), hang, 1, 3) == late
    assert lab.told("RuntimeError: Connection closed by peer") == ""


def test_the_answer_says_what_was_missed_and_what_is_left():
    def row(metric, value, **case):
        case = {"drill": "dead_peer"} | case
        return Record("hang_clinic", metric, "1", (value,), "measured", case, {"patience_s": 1.0}, LAYOUT)

    rows = [row("right", v, what=w) for w, v in zip(lab.NAMED, (1.0, 1.0, 0.0), strict=True)]
    rows += [row("evidence_s", 1.2), row("reading_s", 0.01), row("leftovers", 2.0)]
    said = list(lab.answer(Records(rows)))
    assert (
        "the line 0 times" in said[0] and "Not all right: dead_peer" in said[1] and said[-1].startswith("2 processes")
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"drills": ("dead_pear",)}, "dead_peer"),
        ({"drills": ()}, "drills"),
        ({"patience_s": 0.0}, "patience_s"),
        ({"examine": -1}, "examine"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_values_name_their_option(values, said):
    with pytest.raises(BadInput, match=said):
        make_config(lab_module("hang_clinic"), values)


def test_one_rank_waits_for_nobody():
    with pytest.raises(BadInput, match="2 to 4 ranks"):
        launch("hang_clinic", 1, device="cpu")
