"""The clinic: one changed line each, measurements that know nothing of it, diagnoses in free words, fair scores."""

from __future__ import annotations

import functools
import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labs import clinic
from labs.chapters.nb09 import figures_clinic
from labs.kit.check import Prediction
from labs.kit.errors import BadInput
from labs.kit.lab import make_config
from labs.kit.launch import launch, run_on_ranks
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records
from labs.parts.clinic import consultant, illnesses
from labs.parts.clinic.illnesses import BY_NAME, ILLNESSES, WELL
from labs.parts.clinic.measurements import MEASUREMENTS, Findings

ALL = ILLNESSES + WELL
SEED_OF = {illnesses.draw(seed).name: seed for seed in range(len(ALL))}


# The table


def test_there_are_enough_illnesses_and_healthy_patients():
    assert len(ILLNESSES) >= 12 and len(WELL) >= 4 and len(BY_NAME) == len(ALL)


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


# The consultant


PLAIN: dict[str, Findings] = {
    "steps": {"growth": 1.02},
    "shares": {
        "data": 0.04,
        "forward": 0.3,
        "backward": 0.5,
        "optimizer": 0.02,
        "exposed communication": 0.13,
        "overhead": 0.01,
    },
    "ops": {"forwards per backward": 1.0, "share of aten::mm": 0.5},
    "memory": {"growth MB per step": 0.05},
    "arrivals": {"rank 0 late": 0.0, "rank 1 late": 0.08},
    "cores": {"threads": 1, "cores": 1, "step over one thread per core": 1.02},
    "disk": {"read bytes per step": 10, "written bytes per step": 99, "fsyncs per step": 0, "share of waiting": 0},
    "census": {"float64 share of parameters": 0, "anomaly detection": 0, "share of step saved if plain": 0.01},
    "traffic": {
        "buckets per step": 1,
        "other collectives per step": 0,
        "bytes over parameters": 1.0,
        "share of other collectives": 0.0,
        "step over default buckets": 1.0,
    },
    "same_batch": {"gain if data were free": 1.05, "share of waiting for data": 0.02},
    "batch": {"gain of a batch 4 x as large": 1.6, "samples": 64},
    "alone": {"gain if the exchange were free": 1.3},
}
ILL: dict[str, tuple[str, Findings, float]] = {
    "slow_loader": ("same_batch", {"gain if data were free": 1.5, "share of waiting for data": 0.3}, 1.5),
    "archive": ("disk", {"read bytes per step": 9e5, "share of waiting": 0.2}, 1.05),
    "tiny_batches": ("batch", {"gain of a batch 4 x as large": 3.5, "samples": 4}, 3.5),
    "float64": ("census", {"float64 share of parameters": 1, "share of step saved if plain": 0.5}, 2.0),
    "threads": ("cores", {"threads": 2, "step over one thread per core": 3.0}, 3.0),
    "anomaly": ("census", {"anomaly detection": 1, "share of step saved if plain": 0.2}, 1.25),
    "validation": ("ops", {"forwards per backward": 2.0}, 1 / 0.99),
    "statistics": ("ops", {"share of aten::median": 0.3}, 1 / 0.99),
    "growing": ("memory", {"growth MB per step": 3.0}, 1 / 0.99),
    "fsync": ("disk", {"fsyncs per step": 10, "share of waiting": 0.25}, 4 / 3),
    "checkpoint": ("disk", {"written bytes per step": 5e6, "share of waiting": 0.5}, 2.0),
    "sync_batchnorm": (
        "traffic",
        {"other collectives per step": 8, "step over one without other collectives": 1.25},
        1.25,
    ),
    "averaging": (
        "traffic",
        {
            "other collectives per step": 16,
            "bytes over parameters": 2.0,
            "step over one without other collectives": 2.0,
        },
        2.0,
    ),
    "tiny_buckets": ("traffic", {"buckets per step": 16, "step over default buckets": 1.4}, 1.4),
    "straggler": ("arrivals", {"rank 1 late": 0.5}, 2.0),
}


def with_illness(name: str) -> dict[str, Findings]:
    measurement, changed, _ = ILL[name]
    return PLAIN | {measurement: PLAIN[measurement] | changed}


def test_plain_readings_are_healthy_in_each_measurement():
    assert [consultant.signs(m, f) for m, f in PLAIN.items()] == [[]] * len(MEASUREMENTS)
    assert consultant.diagnosed(PLAIN) == "healthy" and consultant.promised("healthy", PLAIN) == 1.0


@pytest.mark.parametrize("name", ILL)
def test_each_illness_is_named_by_its_key_sign_and_promises_its_share(name):
    found = with_illness(name)
    assert consultant.diagnosed(found) == name == consultant.names(BY_NAME[name].key, found[BY_NAME[name].key])
    if name == "archive":
        found["same_batch"] = {"gain if data were free": 1.05}
    assert consultant.promised(name, found) == pytest.approx(ILL[name][2])
    assert consultant.promised(name, {}) is None, "nothing bought, nothing promised"


def test_every_illness_has_a_case_here():
    assert set(ILL) == {i.name for i in ILLNESSES}


def test_counts_come_before_times():
    """A loader that decodes from an archive: both signs are there, the rarer one names it."""
    found = with_illness("archive") | {"same_batch": {"gain if data were free": 2.0, "share of waiting for data": 0.5}}
    assert consultant.diagnosed(found) == "archive"


def test_an_operator_of_training_is_not_foreign():
    known = {"share of aten::convolution_backward": 0.5, "share of Optimizer.step#AdamW.step": 0.2}
    assert consultant.foreign(known) == "" and consultant.foreign({"share of aten::median": 0.2}) == "aten::median"


# Verdicts


def made(right=True, gain=None, predicted=None, price_s=3.0) -> clinic.Verdict:
    return clinic.Verdict(7, "float64", right, gain, predicted, price_s, 2)


GAIN = Estimate(1.6, 1.5, 1.7, 9, "x")


def test_a_verdict_in_words():
    said = str(made(gain=GAIN, predicted=1.8))
    assert said.startswith(
        "You bought 2 measurements, 3.0 s; the cause is right; you predicted 1.8x, the cure gave "
        "1.60x [1.50, 1.70]. Score: "
    )
    wrong = str(made(right=False))
    assert "the cause is wrong" in wrong and "nothing to put back" in wrong and "Score: 0 of 100" in wrong


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
        ({"kinds": ("ill",)}, "kinds: there is no ill"),
        ({"measure": ("weather",)}, "measure of lab 'clinic' must be"),
        ({"examine": -1}, "examine must be from 0"),
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

    from labs.kit.rank import Rank
    from labs.parts.clinic import illnesses
    from labs.parts.clinic.patients import Patient, process_state

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


@pytest.mark.long
def test_an_examination_says_who_is_called_what():
    run = launch("clinic", examine=1, kinds=("checkpoint",), smoke=True, timeout_s=400)
    assert clinic.key_shown(run) == {("checkpoint", 0): True} and clinic.blind_kept(run) == {("checkpoint", 0): True}
    assert any("1 of 1 patients" in line for line in clinic.answer(run))


@pytest.mark.long
@pytest.mark.quiet
@pytest.mark.timeout(7200)
def test_all_patients_are_told_apart_and_cures_keep_half_of_what_is_promised():
    run = launch("clinic", examine=5, timeout_s=7000)
    said: dict[str, list[bool]] = {}
    for r in run.where("right"):
        said.setdefault(r.case["patient"], []).append(r.value == 1)
    assert all(sum(of_seeds) >= 4 for of_seeds in said.values()), said
    for facts in (clinic.key_shown(run), clinic.blind_kept(run)):
        kept = {i.name: sum(ok for (name, _), ok in facts.items() if name == i.name) for i in ILLNESSES}
        assert all(count >= 4 for count in kept.values()), kept
    assert not [line for line in clinic.cures(run) if "less than half" in line]


# Figures


def examined_run() -> Records:
    """Records as an examination makes them."""
    config, records = {"seed": 0, "gain": None}, []
    for illness in ALL:
        case = {"patient": illness.name, "of_seed": 0}
        found = with_illness(illness.name) if illness in ILLNESSES else PLAIN
        for m in MEASUREMENTS:
            read = consultant.signs(m, found[m])
            says = consultant.names(m, found[m])
            records.append(
                Record(
                    "clinic",
                    "signs",
                    "signs",
                    (len(read),),
                    case=case | {"measure": m, "read": read, "says": says},
                    config=config,
                )
            )
        said = consultant.diagnosed(found)
        ok = clinic.is_right(illness, said)
        records.append(Record("clinic", "right", "", (ok,), case=case | {"said": said}, config=config))
        gain = 1.5 if illness in ILLNESSES else 1.0
        records.append(Record("clinic", "gain", "x", [gain, gain + 0.1, gain - 0.1], case=case, config=config))
        promise = consultant.promised(said, found)
        records.append(Record("clinic", "promised", "x", (promise,), "modelled", case, config))
    return Records(records)


@pytest.fixture
def shown(monkeypatch):
    """Alternative texts and sentences, in place of pictures."""
    found: list[str] = []
    monkeypatch.setattr(figures_clinic, "show", lambda fig, alt: found.append(alt))
    monkeypatch.setattr(figures_clinic, "say", found.append)
    return found


def test_figures_tell_what_the_records_say(shown):
    run = examined_run()
    figures_clinic.matrix(run)
    figures_clinic.before_and_after(run)
    figures_clinic.told(run, Prediction(4, "measurements", "of 12"))
    figures_clinic.scores([made(gain=GAIN, predicted=1.6)])
    figures_clinic.scores([])
    assert "float64: census" in shown[0] and "named by 1 of 12" in shown[0]
    assert "straggler 1.50" in shown[1] and "right about 20 of 20" in shown[2]
    assert shown[2].startswith("* You predicted 4 of 12; it is 1.")
    assert "94 points for 1 patient" in shown[3] and "No patient" in shown[5]


def test_an_examination_with_mistakes_names_them(shown):
    said = {"wide": "threads", "fsync": "fsync"}
    run = Records(
        Record("clinic", "right", "", (name == word,), case={"patient": name, "of_seed": 0, "said": word})
        for name, word in said.items()
    )
    told = " ".join(clinic.examined(run))
    assert "right about 1 of 2" in told and "Healthy patients called ill: wide as threads" in told


def test_the_recorded_examination_is_whole(shown):
    run = figures_clinic.examination()
    figures_clinic.matrix(run)
    figures_clinic.told(run)
    assert {r.kind for r in run} == {"recorded", "modelled"}
    assert len(run.where("right")) == 5 * len(ILLNESSES + WELL)
    assert len(run.where("signs")) == 5 * len(ILLNESSES + WELL) * len(MEASUREMENTS)
    assert len({r.case["of_seed"] for r in run.where("right")}) == 5 and "of 100 patients" in shown[1]


def test_every_cure_gave_half_of_its_promise_where_the_turns_were_long_enough(shown):
    """A cure that gave less is named with its numbers; one line tells of the recorded run with longer turns."""
    examined = figures_clinic.examination()
    figures_clinic.half_given(examined, figures_clinic.longer_turns())
    first, *others = shown[-1].splitlines()
    given, of = map(int, re.findall(r"\d+", first)[:2])
    assert of == len(ILLNESSES) and len(others) == of - given + 1 and others[-1].endswith("at least half of it.")
    poor = Records(replace(r, samples=(1.01,) * len(r.samples)) if r.metric == "gain" else r for r in examined)
    figures_clinic.half_given(poor, figures_clinic.longer_turns())
    assert shown[-1].startswith("* 0 of ") and "less than half" in shown[-1]
