"""Notebook 09's patient has what is said of it and gives no seed of a room away; every measurement is explained."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from labs import clinic
from labs.chapters.nb09 import figures_clinic, guide
from labs.clinic import illnesses
from labs.clinic.measurements import MEASUREMENTS
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records

PATH = Path(__file__).parents[1] / "notebooks" / "09_profiling.ipynb"


def test_the_patient_has_what_is_diagnosed_and_no_room_has_it():
    code = "\n".join(c.source for c in nbformat.read(PATH, as_version=4).cells if c.cell_type == "code")
    seeds = [int(seed) for seed in re.findall(r"clinic\.admit\((\d+)\)", code)]
    [named] = re.findall(r'^treated = patient\.diagnose\("(\w+)"', code, re.MULTILINE)
    illness = illnesses.draw(seeds[0])
    assert illness.name == named and f'patient.measure("{illness.key}")' in code
    assert not set(seeds) & set(clinic.ROOM_SEEDS)


def test_each_measurement_is_explained():
    assert set(guide.ANSWERS) == set(MEASUREMENTS)


def test_every_cause_that_is_listed_is_taken_and_none_is_left_out(monkeypatch):
    shown = []
    monkeypatch.setattr(guide, "show_table", lambda table, folded="": shown.append((table, folded)))
    guide.causes()
    guide.guide()
    [(listed, folded), (measurements, _)] = shown
    assert all(illnesses.recognised(name) == name for name in listed.index) and folded
    assert {i.name for i in illnesses.ILLNESSES} | {"healthy"} == set(listed.index)
    assert measurements.iloc[:, 1]["shares"] == "none: says where"


@pytest.mark.parametrize(
    ("gain", "told"),
    [((1.9, 2.0, 2.1), "more than that"), ((1.2, 1.3, 1.4), "less than that"), ((1.4, 1.5, 1.6), "cannot be told")],
)
def test_what_a_share_promised_stands_beside_what_the_cure_gave(monkeypatch, gain, told):
    said = []
    monkeypatch.setattr(figures_clinic, "say", said.append)
    shares = Record("clinic", "finding", "", (1 / 3,), case={"measure": "shares", "what": "overhead"})
    found = clinic.Verdict(32, "checkpoint", True, Estimate(gain[1], gain[0], gain[2], 9, "x"), 1.5, 1.0, 2)
    figures_clinic.promise(Records([shares]), found, "overhead")
    assert "33 % of a step" in said[0] and "1.50x" in said[0] and told in said[0]
