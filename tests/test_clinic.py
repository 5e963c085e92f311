"""The clinic: one changed line each, measurements that know nothing of it, diagnoses in free words, fair scores."""

from __future__ import annotations

import functools
import io
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labs import clinic
from labs.clinic import illnesses
from labs.clinic.illnesses import BY_NAME, ILLNESSES, WELL
from labs.clinic.measurements import MEASUREMENTS
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


@pytest.mark.parametrize("illness", ILLNESSES, ids=lambda i: i.name)
def test_a_row_names_measurements_that_exist_and_a_notebook(illness):
    assert illness.key in MEASUREMENTS and set(illness.blind) <= set(MEASUREMENTS) - {illness.key}
    assert len(illness.blind) >= 2 and illness.symptom
    assert len(list((Path(__file__).parents[1] / "notebooks").glob(f"{illness.teaches}_*.ipynb"))) == 1


def test_seeds_in_a_row_hold_each_kind_once_in_other_orders():
    first, second = ([illnesses.draw(s).name for s in range(k, k + len(ALL))] for k in (0, len(ALL)))
    assert set(first) == set(second) == set(BY_NAME) and first != second
    assert {illnesses.draw(s).name for s in clinic.ROOM_SEEDS} & {i.name for i in WELL}, "not everybody is ill"
    assert len({illnesses.draw(s).name for s in clinic.ROOM_SEEDS}) == len(clinic.ROOM_SEEDS)


# Free answers


@pytest.mark.parametrize("illness", ILLNESSES, ids=lambda i: i.name)
def test_an_illness_is_recognised_by_name_words_cause_and_line(illness):
    said = [illness.name, illness.name.upper().replace("_", " "), illness.cause, illness.sick, *illness.words]
    assert [illnesses.recognised(s) for s in said] == [illness.name] * len(said)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("the loader is slow, decode once", "slow_loader"),
        ("I think it is in double precision", "float64"),
        ("checkpoints every step", "checkpoint"),
        ("stragler", "straggler"),
        ("It is healthy", "healthy"),
        ("fsync of the log", "fsync"),
        ("anomaly detection", "anomaly"),
        ("", None),
        ("a broken heart", None),
        ("the loader or float64", None),
    ],
)
def test_answers_in_other_words(said, name):
    assert illnesses.recognised(said) == name


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_answer_is_a_known_name_or_none(said):
    assert illnesses.recognised(said) in {None, "healthy", *(i.name for i in ILLNESSES)}


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


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0, 100))
def test_scores_are_points_and_a_price_never_helps(predicted, value, price_s):
    gain = Estimate(value, 0.9 * value, 1.1 * value, 9, "x")
    score = made(gain=gain, predicted=predicted, price_s=price_s).score
    assert 0 <= score <= 100 and score >= made(gain=gain, predicted=predicted, price_s=price_s + 1).score


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


def test_one_rank_is_refused():
    with pytest.raises(BadInput, match="use nproc=2"):
        launch("clinic", nproc=1)


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


@pytest.mark.long
def test_cured_and_healthy_patients_train_alike():
    losses = [run_on_ranks(state_before_and_after, 2, name)[0][2] for name in ("healthy", "zeroed", "slow_loader")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


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


def test_nothing_in_a_run_without_diagnosis_tells_the_illness():
    run = launch("clinic", seed=SEED_OF["checkpoint"], measure=("disk",), smoke=True)
    told = "\n".join([*run.lines(), *clinic.answer(run)])
    assert not [w for w in ("checkpoint", "saved") if w in told]
    assert run.one("finding", measure="disk", what="written bytes per step").value > 1e6


def test_a_wrong_diagnosis_gains_nothing_and_tells_nothing():
    run = launch("clinic", seed=SEED_OF["checkpoint"], diagnose="float64", smoke=True)
    said = list(clinic.answer(run))
    assert not run.where("gain") and "the cause is wrong" in said[-1] and "checkpoint" not in "".join(said)


def test_a_case_in_a_notebook(capsys):
    case = clinic.admit(SEED_OF["anomaly"], smoke=True)
    case.measure("census")
    with pytest.raises(BadInput, match="weather"):
        case.measure("weather")
    found = case.diagnose("anomaly detection is on", gain=1.3)
    printed = capsys.readouterr().out
    assert found.right and found.bought == 1 and found.price_s == case.price_s > 0
    assert "Spent so far" in printed and "anomaly detection 1" in printed and "Score:" in printed


def test_a_conversation_at_a_terminal(monkeypatch, capsys):
    words = "census\nweather\ndiagnose float64 1.2x\ngive up\n"
    monkeypatch.setattr(clinic, "admit", functools.partial(clinic.Case, smoke=True))
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    clinic.interactive(SEED_OF["items"])
    printed = capsys.readouterr().out
    assert "weather" in printed and "the cause is wrong" in printed and "It is healthy" in printed
