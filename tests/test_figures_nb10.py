"""Notebook 10's figures and tables of hangs and preemptions: what they say follows the records."""

from __future__ import annotations

import pytest

from labs.chapters.nb10 import figures_hang, figures_lost
from labs.kit.check import predict
from labs.kit.plot import to_png
from labs.kit.record import Record, Records


@pytest.fixture
def shown(monkeypatch):
    """(figures, alternative texts, sentences, tables) of what is drawn meanwhile."""
    drawn, alts, said, tables = [], [], [], []
    for module in (figures_hang, figures_lost):
        monkeypatch.setattr(module, "show", lambda fig, alt: (drawn.append(fig), alts.append(alt), to_png(fig)))
        monkeypatch.setattr(module, "say", said.append)
    monkeypatch.setattr(figures_hang, "show_table", tables.append)
    return drawn, alts, said, tables


def made(metric, value, unit="1", lab="hang_clinic", **case):
    return Record(
        lab,
        metric,
        unit,
        (value,),
        case=case,
        config={"patience_s": 1.0, "save_every": 12, "grace_s": 30.0},
        layout={"world_size": 2},
    )


def hung(name, line=1.0, cured=1.0):
    case = {"drill": name, "round": 0, "wrong": 1}
    return [
        *(made("right", line if what == "line" else 1.0, what=what, **case) for what in figures_hang.lab.NAMED),
        made("evidence_s", 1.1, "s", said="Rank 1 did not call it.", **case),
        made("reading_s", 0.002, "s", **case),
        made("cured", cured, **case),
        made("leftovers", 0.0, what="processes", **case),
    ]


def test_a_wrong_diagnosis_is_marked(shown):
    _, _, said, tables = shown
    figures_hang.diagnoses(Records([*hung("early_stop"), *hung("dead_peer", line=0.0, cured=0.0)]))
    assert tables[0].loc["dead_peer", "but"] == "WRONG: line" and tables[0].loc["early_stop", "but"] == ""
    assert "right: 1 of 2; cured, 1 of 2 end well" in said[0] and "1.1 s at most" in said[1]


def test_what_is_left_of_them_is_said(shown):
    _, _, said, tables = shown
    run = [r for r in hung("early_stop") if r.metric != "leftovers"]
    figures_hang.diagnoses(Records([*run, made("leftovers", 2.0, what="processes", drill="early_stop", round=0)]))
    assert "but" not in tables[0].columns and "2 processes or folders are left" in said[-1]


def test_calls_of_all_ranks_stand_side_by_side(shown):
    _, _, said, tables = shown
    figures_hang.side_by_side("early_stop", wrong=1, ranks=2)
    last = tables[0].iloc[-1]
    assert last["rank 0"].startswith("all_reduce, line") and last["rank 1"].startswith("barrier, line")
    assert "is `dist.barrier()`" in said[0] and "Rank 1 called barrier" in said[1]


@pytest.mark.parametrize(("again", "title"), [(0.5, "everything else at least 2.0 s"), (5.0, "The habit decides")])
def test_what_a_preemption_consists_of(shown, monkeypatch, again, title):
    _, alts, said, _ = shown
    monkeypatch.setattr(figures_lost.lab, "answer", lambda run: ["told"])
    parts = {"end": 0.5, "start and import": 1.5, "rendezvous": 0.001, "steps again": again}
    of = {"unit": "s", "lab": "preemption", "habit": "no handler"}
    rows = [made("part_s", s, part=p, **of) for p, s in parts.items()]
    run = Records([made("lost_s", sum(parts.values()), **of), *rows])
    figures_lost.preemption(run, predict(3.0, "lost", unit="s"))
    assert title in alts[0] and said[-1] == "* told" and "You predicted 3 s" in said[0]
