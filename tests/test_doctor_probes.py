"""The doctor's probes name wrong trainings by line, and are silent on healthy ones that look alike."""

import runpy

import pytest
from doctor_probe_scripts import HEALTHY, PRELUDE, WRONG

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
    assert probed(HEALTHY[name], tmp_path, monkeypatch) == []
