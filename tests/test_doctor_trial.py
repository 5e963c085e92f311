"""The doctor's trial: what it counts, what it says, and that a visit is a run of the doctor's own command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import assert_no_survivors, new_environment

from labs import doctor_trial as trial
from labs.doctor_trial import Config, Seen
from labs.doctor_trial.cases import BY_NAME
from labs.kit.errors import BadInput
from labs.kit.record import Record, Records, attach_provenance, load


def finding(name: str, kind: str = "slow", **more) -> dict:
    """As in a report."""
    return {"name": name, "kind": kind, "gain": None, "by": "", **more}


def visit(name: str, n: int, *findings: dict) -> list[Record]:
    """Records of one visit to a patient of whom this was said."""
    return list(trial._judged(BY_NAME[name], n, Seen(9.0, 0, list(findings))))


def bound(low: float, value: float, high: float) -> dict:
    """Of a finding."""
    return {"value": value, "low": low, "high": high, "n": 8, "unit": "x"}


def made() -> Records:
    """Three sick patients, two healthy ones, two visits each."""
    option, look = finding("compile", "option"), finding("recompiles", "not priced", by="from the step's parts")
    rows = [
        *visit("slow_loader", 0, finding("slow_loader", gain=bound(2, 2.1, 2.2)), option),
        *visit("slow_loader", 1, finding("own_code"), option, finding("slow_loader", gain=bound(2, 2.3, 2.4))),
        *visit("threads", 0, finding("validation"), finding("own_code"), finding("threads", gain=bound(1, 1.1, 1.2))),
        *visit("threads", 1),
        *visit(
            "no_set_epoch",
            0,
            finding("validation"),
            finding("set-epoch-missing", "wrong result", by=trial.READ),
        ),
        *visit("no_set_epoch", 1, look, look, finding("save-not-atomic", "at risk", by=trial.READ)),
        *visit("images", 0, option, look),
        *visit("images", 1, finding("exchange"), option),
        *visit("train_ddp", 0, finding("zero-grad-missing", "wrong result", by=trial.READ)),
        *visit("train_ddp", 1),
        trial._record("gain", "x", [2.0, 2.1, 2.2, 2.1, 2.0, 2.1, 2.2], patient="slow_loader", factor=1.0),
        trial._record("gain", "x", [3.0, 3.1, 3.2, 3.1, 3.0, 3.1, 3.2], patient="threads", factor=1.0),
    ]
    return Records(attach_provenance(rows))


def test_the_place_of_an_illness_is_counted_without_options_and_readings_by_themselves():
    places = {(r.case["patient"], r.case["run"]): r.value for r in made().where("place")}
    assert places == {
        ("slow_loader", 0): 1,
        ("slow_loader", 1): 2,
        ("threads", 0): 3,
        ("threads", 1): 0,
        ("no_set_epoch", 0): 1,
        ("no_set_epoch", 1): 0,
    }


def test_who_is_healthy_is_accused_by_what_holds_back_or_is_wrong_alone():
    accused = {(r.case["patient"], r.case["run"]): r.case["of"] for r in made().where("accused")}
    assert accused == {
        ("images", 0): [],
        ("images", 1): ["exchange"],
        ("train_ddp", 0): ["zero-grad-missing"],
        ("train_ddp", 1): [],
    }


def test_a_bound_is_compared_with_the_gain_of_the_cure():
    kept = {p.patient: p.kept for p in trial.promises(made())}
    assert kept == {"slow_loader": True, "threads": False}


def test_bad_values_are_refused_with_what_there_is():
    for values, words in (
        ({"cases": ("slow_loder",)}, "slow_loader"),
        ({"runs": 0, "healthy_runs": 0}, "nobody"),
    ):
        with pytest.raises(BadInput, match=words):
            Config(**values)


def run(tmp_path, *options: str) -> tuple[subprocess.CompletedProcess, Records]:
    """The command; its records."""
    env, out = new_environment(), tmp_path / "trial.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "labs.doctor_trial", *options, "--out", str(out)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert_no_survivors(env["LABS_TEST_MARK"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["trial.jsonl"]
    return done, load(out)


@pytest.mark.long
def test_a_smoke_run_visits_two_patients_and_leaves_nothing(tmp_path):
    done, found = run(tmp_path, "--smoke")
    assert "2 visits, about 1 minute" in done.stderr
    assert found.one("place", patient="slow_loader").value in (1, 2)
    assert found.one("gain").value > 0 and {r.case["exit_code"] for r in found.where("visit_s")} == {0}
    assert "first or second in 100 %" in done.stdout
