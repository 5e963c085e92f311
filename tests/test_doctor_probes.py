"""The doctor's probes name wrong trainings by line, and are silent on healthy ones that look alike."""

import json
import os
import runpy
from pathlib import Path

import pytest
from doctor_probe_scripts import (
    HEALTHY,
    HEALTHY_ON_RANKS,
    PRELUDE,
    RANKS_END,
    RANKS_PRELUDE,
    WRONG,
    WRONG_ON_RANKS,
)
from forked import Forks

from labs.doctor.hooks import Hooks
from labs.doctor.probes import Probes, merge


def probed(code, folder, monkeypatch):
    """Findings of a script that is run in this process, with the doctor's hooks."""
    script = folder / "train.py"
    script.write_text(PRELUDE + code)
    (folder / "scratch").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DOCTOR_PROBES_RAISE", "1")
    probes = Probes(str(folder), str(folder / "scratch"))
    hooks = Hooks(str(folder), lambda spans: None)
    probes.install()
    hooks.install()
    hooks.probes = probes
    try:
        runpy.run_path(str(script), run_name="__main__")
        return merge([probes.findings()])
    finally:
        hooks.remove()
        probes.remove()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_training_is_named_by_line(name, tmp_path, monkeypatch):
    probe, code = WRONG[name]
    line = next(n for n, text in enumerate((PRELUDE + code).splitlines(), 1) if text.endswith("# here"))
    first = (probed(code, tmp_path, monkeypatch) or [None])[0]
    assert first is not None and (first.probe, first.line) == (probe, line), first


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_is_not_accused(name, tmp_path, monkeypatch):
    assert [f for f in probed(HEALTHY[name], tmp_path, monkeypatch) if f.wrong] == []


@pytest.fixture(scope="module")
def forks():
    root = str(Path(__file__).parents[1])
    with Forks(os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "DOCTOR_PROBES_RAISE": "1"}) as forks:
        yield forks


def probed_on_ranks(code, folder, forks):
    """Findings of a script that two ranks run."""
    script, harness = folder / "train.py", Path(__file__).with_name("doctor_probe_rank.py")
    script.write_text(PRELUDE + RANKS_PRELUDE + code + RANKS_END)
    code, out, errors = forks.run([str(harness), str(script)], 2, forks.env, folder, 290)
    assert code == 0, out + errors
    return merge([json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)])


@pytest.mark.parametrize("name", WRONG_ON_RANKS)
def test_wrong_ranks_are_named_by_line(name, tmp_path, forks):
    probe, code = WRONG_ON_RANKS[name]
    lines = (PRELUDE + RANKS_PRELUDE + code).splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# here"))
    first = (probed_on_ranks(code, tmp_path, forks) or [None])[0]
    assert first is not None and (first.probe, first.line) == (probe, line), first


@pytest.mark.parametrize("name", HEALTHY_ON_RANKS)
def test_healthy_ranks_are_not_accused(name, tmp_path, forks):
    assert [f for f in probed_on_ranks(HEALTHY_ON_RANKS[name], tmp_path, forks) if f.wrong] == []
