"""The clinic: one changed line each, measurements that know nothing of it, diagnoses in free words, fair scores."""

from __future__ import annotations

import functools
import io
import math
import sys

import pytest
import torch

from labs import clinic
from labs.clinic import illnesses
from labs.clinic.illnesses import ILLNESSES, WELL
from labs.kit.errors import BadInput
from labs.kit.lab import make_config
from labs.kit.launch import launch, run_on_ranks
from labs.kit.measure import Estimate

ALL = ILLNESSES + WELL
SEED_OF = {illnesses.draw(seed).name: seed for seed in range(len(ALL))}


# The table


@pytest.mark.parametrize("illness", ALL, ids=lambda i: i.name)
def test_a_patient_differs_from_the_healthy_training_in_one_line(illness):
    before, after = illnesses.healthy_source().splitlines(), illnesses.source(illness).splitlines()
    different = [k for k, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
    assert different == ([illnesses.line(illness)] if illness.healthy else [])
    compile(illnesses.source(illness), illness.name, "exec")
    if illness.healthy:
        out, back = illnesses.cure(illness).splitlines()
        assert out[0] == "-" and back[0] == "+" and illness.healthy in back and illness.sick in out


# Free answers


@pytest.mark.parametrize("illness", ILLNESSES, ids=lambda i: i.name)
def test_an_illness_is_recognised_by_name_words_cause_and_line(illness):
    said = [illness.name, illness.name.upper().replace("_", " "), illness.cause, illness.sick, *illness.words]
    assert [illnesses.recognised(s) for s in said] == [illness.name] * len(said)


# Verdicts


def made(right=True, gain=None, predicted=None, price_s=3.0) -> clinic.Verdict:
    return clinic.Verdict(7, "float64", right, gain, predicted, price_s, 2)


GAIN = Estimate(1.6, 1.5, 1.7, 9, "x")


def test_scores_by_hand():
    assert made(gain=GAIN, predicted=1.6).score == 60 + 40 - 6
    assert made(gain=GAIN, predicted=3.4).score == 60 - 6, "a factor of two away from the interval"
    assert made(gain=GAIN, predicted=1.7 * math.sqrt(2)).score == 60 + 20 - 6
    assert made(gain=GAIN).score == 54 and made(gain=GAIN, price_s=100).score == 0
    assert made(right=False, gain=GAIN, predicted=1.6, price_s=1).score == 0


# Bad input


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seed": -1}, "seed must be from 0"),
        ({"steps": 2}, "steps must be from 4"),
        ({"gain": 1.5}, "say of which, diagnose"),
        ({"gain": 0.0, "diagnose": "float64"}, "gain must be from 0.1"),
        ({"diagnose": "flaot"}, "no cause that is known here"),
        ({"measure": ("weather",)}, "measure of lab 'clinic' must be"),
    ],
)
def test_bad_values_are_told_in_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        make_config(clinic, values)


# Real patients


def state_before_and_after(name: str) -> tuple:
    """On a rank: the process's state around a patient's steps, its losses, and what is left on disk."""
    import tempfile
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from labs.clinic import illnesses
    from labs.clinic.patients import Patient, process_state
    from labs.kit.rank import Rank

    rank = Rank(dist.get_rank(), 2, 0, 2, torch.device("cpu"), "gloo", ())
    before = process_state()
    with tempfile.TemporaryDirectory() as folder:
        text = illnesses.source(illnesses.BY_NAME[name])
        patient = Patient(text, rank, 0, Path(folder))
        patient.go(3)
        found = before == process_state(), patient.state, patient.losses
        patient.close()
    return *found, Path(folder).exists()


@pytest.mark.parametrize(("name", "field", "value"), [("float64", 1, torch.float64), ("anomaly", 2, True)])
def test_a_patient_leaves_its_process_as_it_was(name, field, value):
    for same, state, losses, left in run_on_ranks(state_before_and_after, 2, name):
        assert same and state[field] == value and all(map(math.isfinite, losses)) and not left


@pytest.fixture(scope="module")
def float64():
    """A patient with a sign that no neighbour can disturb, two measurements, and the right diagnosis."""
    return launch(
        "clinic", seed=SEED_OF["float64"], measure=("census", "disk"), diagnose="double precision", gain=1.5, smoke=True
    )


def test_a_run_sells_measurements_and_applies_the_cure(float64):
    assert [r.case["measure"] for r in float64.where("price_s")] == ["census", "disk"]
    assert float64.one("finding", measure="census", what="float64 share of parameters").value == 1
    assert all(r.value > 0 for r in float64.where("price_s")) and len(float64.one("gain").samples) == 2
    said = list(clinic.answer(float64))
    assert said[0].startswith(f"Patient {SEED_OF['float64']}: 64 images a step and rank")
    assert "census (" in said[1] and "disk (" in said[2] and "the cause is right; you predicted 1.5x" in said[3]
    assert "- torch.set_default_dtype(torch.float64)" in said


def test_a_conversation_at_a_terminal(monkeypatch, capsys):
    words = "census\nweather\ndiagnose float64 1.2x\ngive up\n"
    monkeypatch.setattr(clinic, "admit", functools.partial(clinic.Case, smoke=True))
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    clinic.interactive(SEED_OF["items"])
    printed = capsys.readouterr().out
    assert "weather" in printed and "the cause is wrong" in printed and "It is healthy" in printed
