"""Notebook 09's patient has what is said of it and gives no seed of a room away; every measurement is explained."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

from labs import clinic
from labs.chapters.nb09 import guide
from labs.parts.clinic import illnesses
from labs.parts.clinic.measurements import MEASUREMENTS

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
