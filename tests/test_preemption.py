"""What a preemption costs by habit: the parts are its whole, the formula is its mean, and nothing is lost for good."""

import os
import random
import signal
import statistics

import pytest
from processes import MARK, assert_no_survivors

from labs import preemption
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.preemption import requeued
from labs.preemption.requeued import Start

pytestmark = pytest.mark.timeout(300)
LAYOUT = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cpu"}


def test_the_parts_of_a_preemption_are_all_of_it():
    """Saved at step 4, stopped after step 6: steps 5 and 6 are done again, 7 is new."""
    before = Start(0.0, {5: 1.0, 6: 2.0}, signalled=2.5, ended=3.0)
    events = [
        {"event": e, "time": t, "rank": r}
        for e, t, r in [
            ("imported", 7.0, 0),
            ("imported", 8.0, 1),
            ("ready", 8.5, 0),
            ("ready", 8.5, 1),
            ("group", 9.0, 0),
        ]
    ]
    after = Start(3.1, {5: 11.0, 6: 12.0, 7: 13.5}, events=events)
    parts = dict(requeued.phases(before, after))
    assert parts == {
        "end": 0.5,
        "start and import": 5.0,
        "data and checkpoint": 0.5,
        "rendezvous": 0.5,
        "model and first step": 2.0,
        "steps again": 2.5,
    }
    assert sum(parts.values()) == 13.5 - 2.5


def test_the_formula_is_the_mean_over_when_it_comes():
    """Without the handler, training is where it was when all that was done since the last save is done again."""
    draw = random.Random(0)
    drawn = [draw.uniform(0.0, 10_000.0) for _ in range(40_000)]  # when it comes, in steps
    lost = [3.0 + 0.1 * (preemption.steps_redone(int(at), 20, handler=False) + at % 1) for at in drawn]
    assert preemption.predict(0.1, 20, 3.0, handler=False) == pytest.approx(statistics.fmean(lost), rel=0.005)
    assert preemption.predict(0.1, 20, 3.0, handler=True) == 3.0 and preemption.steps_redone(19, 20, handler=True) == 0


@pytest.mark.parametrize(
    ("lab", "values", "words"),
    [
        ("preemption", {"save_every": 1}, "save_every"),
        ("preemption", {"after_save": 1.0}, "after_save"),
        ("preemption", {"steps": 20}, "steps must be at least"),
        ("preemption", {"batch_size": 3}, "even number"),
        ("preemption", {"grace_s": 0.0}, "grace_s"),
        ("preemption", {"habits": ("hope",)}, "habits"),
        ("preemption", {"large_bytes": 5}, "large_bytes"),
        ("preemption", {"seed": -1}, "seed"),
        ("preemption", {"habits": ()}, "habits"),
    ],
)
def test_bad_values_are_told(lab, values, words):
    with pytest.raises(BadInput, match=words):
        make_config(lab_module(lab), values)


def test_more_ranks_are_refused_before_any_starts():
    with pytest.raises(BadInput, match="nproc=1"):
        launch("preemption", 2)


@pytest.fixture(scope="module")
def preempted():
    return launch(
        "preemption", 1, device="cpu", save_every=4, steps=24, batch_size=200, large_bytes=50_000_000, timeout_s=250
    )


@pytest.mark.drill
def test_each_habit_on_real_ranks(preempted):
    redone = {r.case["habit"]: r for r in preempted.where("redone") if r.kind == "measured"}
    modelled = {r.case["habit"]: r.value for r in preempted.where("redone") if r.kind == "modelled"}
    assert {h: r.value for h, r in redone.items()} == modelled
    assert redone["handler"].value == 0
    assert all(r.value == r.case["last"] % 4 for h, r in redone.items() if h != "handler")
    codes = {r.case["habit"]: r.value for r in preempted.where("exit_code")}
    assert codes == {"handler": 128 + signal.SIGTERM, "no handler": -signal.SIGTERM, "killed at once": -signal.SIGKILL}
    assert preempted.one("weights_equal").value == 1 and all(r.value for r in preempted.where("losses_equal"))
    for lost in preempted.where("lost_s"):
        parts = preempted.where("part_s", habit=lost.case["habit"])
        assert sum(p.value for p in parts) == pytest.approx(lost.value)
    [saved] = preempted.where("saved_after_s")
    assert saved.case["habit"] == "handler" and saved.value > 0
    said = list(preemption.answer(preempted))
    assert len(said) == 8 and "bit by bit" in said[6]
    assert_no_survivors(os.environ[MARK], os.getpid())


def told(*more, handler_end=1.0, again=3.0, equal=1.0):
    """The answer to a run of two habits: 1 GB saved in 0.5 s."""

    def row(metric, value, unit="s", **case):
        return Record(
            "preemption", metric, unit, (value,), "measured", case, {"save_every": 4, "grace_s": 30.0}, LAYOUT, {}
        )

    rows = [row("step_s", 0.1), row("save_s", 0.5), row("checkpoint_bytes", 1e9, "B"), row("weights_equal", equal, "1")]
    for habit, parts in (
        ("handler", {"end": handler_end, "start and import": 2.0, "steps again": 0.0}),
        ("no handler", {"end": 0.5, "start and import": 5.0, "steps again": again}),
    ):
        rows += [
            row("lost_s", sum(parts.values()), habit=habit),
            row("redone", 0.0 if habit == "handler" else 2.0, "steps", habit=habit),
            row("losses_equal", 1.0, "1", habit=habit),
            *(row("part_s", s, habit=habit, part=part) for part, s in parts.items()),
        ]
    return " ".join(preemption.answer(Records([*rows, *(row(*r[:3], **r[3]) for r in more)])))


def test_an_answer_does_not_hide_another_result():
    said = told(equal=0.0)
    assert "NOT the undisturbed one" in said and "2 steps done again" in said
    assert "took from 2.00 to 5.00 s" in said
    assert "0.20 s of steps are lost in the mean, at most 0.40 s" in said


@pytest.mark.parametrize(
    ("end", "again", "words"),
    [
        (
            1.0,
            3.0,
            "saved 3.00 s of steps, and the job took 0.50 s longer to end: by these two parts alone 2.50 s less",
        ),
        (
            2.5,
            0.7,
            "saved 0.70 s of steps, and the job took 2.00 s longer to end: by these two parts alone 1.30 s more",
        ),
        (0.3, 0.1, "saved 0.10 s of steps, and the job took 0.20 s less to end: by these two parts alone 0.30 s less"),
    ],
)
def test_whether_the_handler_pays_is_read_from_the_run(end, again, words):
    assert words in told(handler_end=end, again=again)


def test_what_fits_into_the_grace_period_needs_two_sizes():
    """1 GB in 0.5 s and 3 GB in 1.5 s: 2 GB/s for what is left of 30 s after an end of 1 s that saved 1 GB."""
    assert "59.0 GB fit" in told(("large_save_s", 1.5, "s", {"bytes": 3_000_000_000}))
    for nothing in (told(), told(("large_save_s", 0.4, "s", {"bytes": 3_000_000_000})), told(handler_end=31.0)):
        assert "does not tell" in nothing and "GB fit" not in nothing


def test_the_second_file_is_removed(tmp_path):
    assert requeued.save_s(tmp_path, 4_000_000) > 0 and not list(tmp_path.iterdir())
