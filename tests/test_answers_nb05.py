"""What the experiments of notebook 05 say first is chosen by their records: each sentence with records that turn it."""

from __future__ import annotations

import pytest

from labs import memory_remedies, sharded_checkpoint, training_checkpoint
from labs.chapters.nb05 import figures
from labs.kit.record import Record, Records

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005)


def make(metric, samples, unit="s", kind="measured", config=None, **case):
    samples = tuple(float(s) for s in (samples if isinstance(samples, (list, tuple)) else [samples]))
    return Record("lab", metric, unit, samples, kind, case, config or {"model": "deep_mlp"}, {"world_size": 2})


def around(value):
    return [value * n for n in NOISE]


def said(lab, records):
    return " ".join(lab.answer(Records(records)))


# -- memory_remedies


def test_whether_growth_and_the_peak_tell_leaks_is_what_the_loops_show():
    def loops(larger, growth):
        found = []
        for loop, leaky, peak, grows in (
            ("none", False, 9.0, 0.0),
            ("large", False, larger, 0.0),
            ("losses", True, 20.0, growth),
        ):
            case = {"part": "leaks", "loop": loop, "leaks": leaky}
            found += [make("growth_bytes", grows, **case), make("peak_so_far_bytes", [1.0, peak], **case)]
        return said(memory_remedies, found)

    assert "the peak alone does not." in loops(50.0, 4.0) and "the peak alone does, too" in loops(10.0, 4.0)
    assert "Growth does not tell all leaks" in loops(10.0, 0.0)


# -- training_checkpoint


def kills(lost, saving):
    found = []
    for way in ("in place", "rename", "full"):
        gone = lost if way == "in place" else [0] * len(lost)
        found += [
            make("lost", gone, way=way),
            make("killed_while_saving", saving, way=way),
            make("leftovers", [0] * len(lost), way=way),
            make("predicted_lost_share", 1.0, way=way),
        ]
    return Records(found)


def test_only_kills_during_a_save_count():
    run = kills([1, 1, 0, 0], [1, 1, 1, 0])
    assert training_checkpoint.lost_in(run, "in place").value == pytest.approx(200 / 3)
    assert training_checkpoint.lost_in(run, "in place").n == 3 and training_checkpoint.lost_in(run, "full").value == 0
    none = training_checkpoint.lost_in(kills([0, 0], [0, 0]), "in place")
    assert (none.n, none.low, none.high) == (0, 0, 100)


# -- sharded_checkpoint


def costs(lost):
    found = []
    for mode, stall, total in (("gathered", 0.3, 0.3), ("save", 0.2, 0.2), ("async_save", 0.02, 0.4)):
        loses = lost if mode == "async_save" else stall
        found += [
            make("stall_s", around(stall), mode=mode),
            make("total_s", around(total), mode=mode),
            make("lost_s", around(loses), mode=mode),
        ]
    return found


@pytest.mark.parametrize(("lost", "words"), [(0.05, "it is cheaper"), (0.4, "it costs more"), (0.2, "no difference")])
def test_async_saving_is_judged_by_all_that_training_loses(lost, words):
    told = " ".join(sharded_checkpoint.costs(Records(costs(lost))))
    assert words in told and "stands still for 20.0 ms" in told and "on the disk after 400 ms" in told


# -- tables of the notebook


def test_the_tables_column_of_the_real_peak_is_tensors_and_workspace():
    case = {"part": "small", "model": "cnn", "policy": "none", "optimizer": "sgd"}
    rows = [make("peak_bytes", 3e6, category=c, **case) for c in figures.CATEGORIES]
    rows += [make("measured_bytes", 18e6, **case), make("workspace_bytes", 6e6, **case)]
    found = figures.checked(Records(rows)).loc["cnn"]
    assert (found["real tensors MB"], found["real peak with workspace MB"]) == (18.0, 24.0)
    assert found["workspace on top"] == "+33%" and found["error"] == "+0.00%"
