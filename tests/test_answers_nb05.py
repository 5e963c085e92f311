"""What the experiments of notebook 05 say first is chosen by their records: each sentence with records that turn it."""

from __future__ import annotations

import pytest

from labs import (
    activation_checkpointing,
    checkpoints,
    elastic_restart,
    memory_remedies,
    sharded_checkpoint,
    training_checkpoint,
)
from labs.chapters.nb05 import figures, figures_recompute, figures_restart
from labs.kit.record import Record, Records
from labs.parts.activation_memory import report
from labs.parts.checkpoints import save

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005)


def make(metric, samples, unit="s", kind="measured", config=None, **case):
    samples = tuple(float(s) for s in (samples if isinstance(samples, (list, tuple)) else [samples]))
    return Record("lab", metric, unit, samples, kind, case, config or {"model": "deep_mlp"}, {"world_size": 2})


def around(value):
    return [value * n for n in NOISE]


def said(lab, records):
    return " ".join(lab.answer(Records(records)))


# -- activation_checkpointing


def sizes(one_row, many, none=0.1, rows=(1, 1024)):
    """Steps with nothing recomputed, and seconds that selective adds to one of few and of many rows."""
    found = []
    for n, added in zip(rows, (one_row, many), strict=True):
        found.append(make("step_s", around(none * n), part="sizes", policy="none", rows=n))
        adds = added if isinstance(added, list) else [added] * 6
        times = [t + a for t, a in zip(around(none * n), adds, strict=True)]
        found.append(make("step_s", times, part="sizes", policy="selective", rows=n))
    return found


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (sizes(0.05, 3.0), "adds 50.0 ms [50.0, 50.0] to a step of 1 row, which has 1/1024 of the operations"),
        (sizes(0.05, 3.0), "the rest grows with the rows"),
        (sizes(0.05, 0.05), "no more that this run can show"),
        (sizes([-0.1, 0.1] * 3, 3.0), "a fixed price cannot be told in this run"),
    ],
)
def test_the_fixed_price_is_told_by_its_interval(records, words):
    assert words in " ".join(report.fixed_price(Records(records)))


def test_without_sizes_nothing_is_said_of_a_fixed_price():
    assert list(report.fixed_price(Records([make("step_s", 1.0, part="pareto", policy="none")]))) == []


def pareto(equal=1.0, again=1.0):
    """`again`: whether two runs without policy are equal."""
    found = []
    for policy, peak, times, k in (("none", 40e6, 1.0, 0), ("segments:4", 30e6, 1.4, 4)):
        case = {"part": "pareto", "policy": policy, "segments": k, "share": 1.0}
        found += [
            make("peak_bytes", peak, **case),
            make("step_s", around(times), **case),
            make("flops", 4e9 if k else 3e9, **case),
            make("gradients_equal", equal if k else again, **case),
            make("gradient_difference", (1 - equal if k else 1 - again) * 1e-6, **case),
        ]
    return found


def test_recomputation_says_what_the_least_memory_costs_and_whether_gradients_are_equal():
    right, wrong = said(activation_checkpointing, pareto()), said(activation_checkpointing, pareto(0.0))
    assert "The least of 1 policies is 30.0 MB (segments:4): it has 1.33 x the operations and takes 1.40 x" in right
    assert ": equal, bit for bit." in right and "NOT equal under 1 of 1 policies, by up to 1e-06" in wrong
    assert "bits cannot tell, for two runs of one step differ" in said(activation_checkpointing, pareto(0.0, 0.0))
    lost = [make("raised", 0, part="variants", scenario=s, variant="use_reentrant=False") for s in ("a", "b")]
    lost += [
        make("parameters_without_gradient", n, part="variants", scenario=s, variant="use_reentrant=False")
        for s, n in (("a", 0), ("b", 4))
    ]
    assert "1 of 2 ways to call checkpoint() train all" in said(activation_checkpointing, lost)


# -- memory_remedies


def test_remedies_name_the_best_and_the_worst_of_each_model():
    def peaks(half, sgd):
        case = {"part": "remedies", "model": "mlp", "full_of": "states"}
        return [make("peak_bytes", p, remedy=r, **case) for r, p in (("none", 1e7), ("half", half), ("SGD", sgd))]

    assert "SGD leaves 50 % of the peak, half leaves 100 %" in said(memory_remedies, peaks(1e7, 5e6))
    assert "half leaves 40 % of the peak, SGD leaves 90 %" in said(memory_remedies, peaks(4e6, 9e6))


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


def test_without_a_kill_in_time_no_share_is_said(monkeypatch):
    shown, guess = [], type("Guess", (), {"against": lambda self, e: "guess told"})()
    monkeypatch.setattr(figures_restart, "show_table", lambda t: shown.append(t.to_string()))
    monkeypatch.setattr(figures_restart, "say", shown.append)
    figures_restart.kills(kills([0, 0], [0, 0]), guess)
    assert "no kill came in time" in shown[0] and "guess told" not in shown[1]
    figures_restart.kills(kills([1, 1], [1, 1]), guess)
    assert "no kill came in time" not in shown[2] and "guess told" in shown[3]


def test_a_resumed_training_that_differs_is_said_to_differ():
    def resumed(equal):
        return said(training_checkpoint, [make("bitwise_equal", equal, forgotten="nothing", part="losses")])

    assert "is equal bit for bit" in resumed(1.0) and "still DIFFERS in: losses" in resumed(0.0)


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


# -- elastic_restart


def restart(equal=1.0, left=0.0):
    case = {"run": "killed", "start": "torchrun"}
    return said(
        elastic_restart,
        [
            make("restart_s", 2.0, **case),
            make("steps_redone", 2, **case),
            make("killed_at_step", 23, **case),
            make("state_equal", equal, **case),
            make("phase_s", 1.7, phase="import", **case),
            make("phase_s", 0.3, phase="detect", **case),
            make("leftovers", left, what="processes"),
        ],
    )


def test_a_restart_says_where_the_time_goes_and_what_differs():
    assert "2.00 s from the kill to the next step, most of it for: import (1.70 s); 2 step(s) done twice" in restart()
    assert "equal bit for bit to" in restart() and "DIFFERENT from" in restart(0.0)
    assert "No process and no folder is left" in restart() and "1 processes or folders are LEFT" in restart(left=1.0)


# -- the list of a folder


def test_the_list_of_checkpoints_says_first_which_one_would_be_used(tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path, step, {"step": step})
    assert checkpoints.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "2 of 2 checkpoints are good; a training would resume from: step-00000002"
    )
    last = tmp_path / "step-00000002.pt"
    last.write_bytes(last.read_bytes()[:-7])
    assert checkpoints.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(
        "1 of 2 checkpoints are good; a training would resume from: step-00000001"
    )


# -- tables of the notebook


def test_the_tables_column_of_the_real_peak_is_tensors_and_workspace():
    case = {"part": "small", "model": "cnn", "policy": "none", "optimizer": "sgd"}
    rows = [make("peak_bytes", 3e6, category=c, **case) for c in figures.CATEGORIES]
    rows += [make("measured_bytes", 18e6, **case), make("workspace_bytes", 6e6, **case)]
    found = figures.checked(Records(rows)).loc["cnn"]
    assert (found["real tensors MB"], found["real peak with workspace MB"]) == (18.0, 24.0)
    assert found["workspace on top"] == "+33%" and found["error"] == "+0.00%"


def test_what_a_policy_adds_is_in_the_table_of_sizes(monkeypatch):
    shown = []
    monkeypatch.setattr(figures_recompute, "show_table", lambda t: shown.append(t))
    monkeypatch.setattr(figures_recompute, "say", shown.append)
    figures_recompute.sizes(Records(sizes(0.05, 3.0)))
    assert list(shown[0].index) == ["1", "1,024"] and "50.0 ms" in shown[0].loc["1", "Selective: adds"]
    assert "grows with the rows" in shown[1]
