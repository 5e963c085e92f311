"""Notebook 09's figures of a step: what they draw and say follows the records."""

from __future__ import annotations

import pytest

from labs import memory_timeline, profile_step
from labs.chapters.nb09 import figures_step as figures
from labs.common.oracle.trace import CATEGORIES
from labs.kit.check import predict
from labs.kit.plot import kinds_in, to_png
from labs.kit.record import Record, Records


@pytest.fixture
def shown(monkeypatch):
    """(figures, alternative texts, sentences, tables) of what is drawn meanwhile."""
    drawn, alts, said, tables = [], [], [], []
    monkeypatch.setattr(figures, "show", lambda fig, alt: (drawn.append(fig), alts.append(alt), to_png(fig)))
    monkeypatch.setattr(figures, "say", said.append)
    monkeypatch.setattr(figures, "show_table", lambda table: tables.append(table))
    return drawn, alts, said, tables


def made(metric, samples, rank=None, unit="s", lab="profile_step", **case):
    layout = {"rank": rank, "world_size": 2}
    samples = [samples] if isinstance(samples, float) else samples
    return Record(lab, metric, unit, samples, case=case, layout=layout, config={"active": 8})


def step_run(exposed=0.004, ddp=0.014, gpu=False):
    parts = {
        "data": 0.001,
        "host-to-device": 0.0,
        "forward": 0.003,
        "backward": 0.002,
        "exposed communication": exposed,
        "optimizer": 0.001,
        "overhead": 0.0,
    }
    parts |= {"idle": 0.002} if gpu else {}
    found = []
    for rank in (0, 1):
        found += [made("share_s", [s] * 8, rank, share=name) for name, s in parts.items()]
        found.append(made("step_s", [1.01 * sum(parts.values())] * 8, rank, mode="profiled"))
        for mode, seconds in (("ddp", ddp), ("no_sync", 0.010)):
            found.append(made("step_s", [seconds] * 8, rank, mode=mode))
    return Records(found)


def test_shares_are_stacked_and_named(shown):
    drawn, alts, said, _ = shown
    run = step_run()
    figures.shares({"healthy": run, "late": step_run(0.024)}, predict(30, "share", "%"), "forward")
    assert (
        "Healthy, rank 0: 36 % of a step is exposed communication" in alts[0] and "late, rank 1: data 1.00" in alts[0]
    )
    assert kinds_in(drawn[0]) == {"measured"}
    assert [t.get_text() for t in drawn[0].axes[0].get_yticklabels()] == [
        "healthy, rank 0",
        "healthy, rank 1",
        "late, rank 0",
        "late, rank 1",
    ]
    assert "You predicted 30 % for forward; it is 27 %" in said[0] and "99.0 %" in said[0]
    ends = [p.vertices[:, 0].max() for c in drawn[0].axes[0].collections for p in c.get_paths()]
    assert max(ends) == pytest.approx(31), "bars end where the step does, in ms"


def test_idle_is_shown_where_a_gpu_has_it(shown):
    drawn, *_ = shown
    for gpu in (False, True):
        figures.shares(step_run(gpu=gpu))
        names = [t.get_text() for t in drawn[-1].legends[0].get_texts()]
        assert ("idle" in names) == gpu


@pytest.mark.parametrize(("ddp", "words"), [(0.014, "no difference can be told"), (0.030, "They differ")])
def test_two_ways_to_find_exposed_communication_are_compared(ddp, words):
    assert words in " ".join(figures.share_text(step_run(ddp=ddp)))


def cost_run(on):
    found = [made(metric, [0.01] * 9, profiler="off") for metric in ("cost_step_s", "cost_cpu_s")]
    for name in list(profile_step.SETTINGS)[1:]:
        found += [made(metric, [0.01 * f for f in on], profiler=name) for metric in ("cost_step_s", "cost_cpu_s")]
        found.append(made("cost_stop_s", [0.25] * 9, profiler=name))
        found += [made("trace_bytes", 50e3, profiler=name, unit="B"), made("trace_events", 200.0, profiler=name)]
    return Records(found)


def test_the_profilers_price_is_named_only_where_it_can_be_told(shown):
    _, alts, said, _ = shown
    figures.cost(cost_run([1.4, 1.5, 1.6] * 3), predict(1.2, "price", "x"))
    assert "1.50 times as long" in alts[0] and "25.0 µs" in said[0] and "25 MB" in said[0]
    assert "notes times. times: 1.50" in alts[0] and "`stop()` takes 250" in said[0]
    figures.cost(cost_run([0.9, 1.0, 1.1] * 3))
    assert alts[1].startswith("What looking costs, this run cannot show") and "cannot show" in said[1]


def test_operations_and_columns(shown):
    _, _, said, tables = shown
    mm = {"op": "aten::mm", "calls": 6.0}
    ops = [
        made("op_self_s", 0.002, 0, **mm),
        made("op_total_s", 0.003, 0, **mm),
        made("ops_self_s", 0.009, 0),
        made("ops_total_s", 0.03, 0),
    ]
    figures.operations(Records([*step_run(), *ops]))
    assert tables[0].loc["aten::mm"].tolist() == ["6", "2.000 ms", "3.000 ms"] and "totals 2.7" in said[0]
    figures.columns()
    assert "Self CPU" in tables[1].index


def memory_run(growth):
    found = []
    for loop, each in (("none", 0), ("validation", growth)):
        for category in CATEGORIES:
            after = [1e6 + (each * k if category == "activations" else 0) for k in range(4)]
            curve = [a for a in after for _ in range(2)]
            case = {"loop": loop, "category": category, "lab": "memory_timeline"}
            found += [made("after_step_bytes", after, 0, "B", **case), made("curve_bytes", curve, 0, "B", **case)]
        peak = [6e6 + each * k for k in range(4)]
        found += [
            made("curve_step", [0.5 * k for k in range(1, 9)], 0, "1", "memory_timeline", loop=loop),
            made("peak_bytes", peak, 0, "B", "memory_timeline", loop=loop),
        ]
    return Records(found)


@pytest.mark.parametrize(
    ("growth", "message"), [(0, "No loop leaves anything behind"), (5e5, "leaves 500.00 kB behind")]
)
def test_a_leak_is_told_from_none(shown, growth, message):
    drawn, alts, said, _ = shown
    run = memory_run(growth)
    figures.memory(run, predict(300, "leak", "kB"))
    assert message in alts[0] and len(drawn[0].axes) == 2
    assert "You predicted 300 kB" in said[0] and ("no category grows" in said[0])
    assert drawn[0].axes[0].get_ylim()[1] * 1e6 > max(max(r.samples) for r in run.where("peak_bytes"))
    assert memory_timeline.growth(run, "validation") == ({"activations": growth} if growth else {})
