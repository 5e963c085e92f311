"""The doctor on training scripts that people really use, unchanged: tests/public_scripts.py lists them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import MARK, assert_no_survivors, family, new_environment
from public_scripts import COMMITS, SCRIPTS, STAND_INS, VARIABLE, Script, lay_out, scripts_folder
from test_doctor import state

from labs.parts.doctor import report
from labs.parts.doctor.facts import AS_IS

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
LIMIT_S = 250
STEPS = 10


@pytest.fixture
def clones() -> Path:
    folder = scripts_folder()
    if folder is None:
        pytest.skip(f"{VARIABLE} names no folder with clones of public repositories: see tests/public_scripts.py")
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_public_script_is_seen_and_left_as_it_was(script, clones, tmp_path):
    if not (clones / script.repository / script.path).is_file():
        pytest.skip(f"{clones} has no {script.repository} at {COMMITS[script.repository]}: clone it there")
    folder = lay_out(script, clones, tmp_path)
    before = state(tmp_path / "repository")
    code, said = _examine(script, folder, tmp_path)
    assert state(tmp_path / "repository") == before
    assert code == 0, said
    found = report.load(tmp_path / "out" / "report.json")
    assert [f.rank for f in found.facts] == list(range(script.ranks or 1))
    for facts in found.facts:
        _assert_seen(script, facts, said)
    certain = {(f.name, _line(f.where)) for f in found.findings if f.certainty in ("wrong", "outdated", "costs")}
    assert certain == set(script.rules)
    assert any("train one model" in text for text in found.unknown) == script.apart


def _examine(script: Script, folder: Path, tmp_path: Path) -> tuple[int, str]:
    """Exit code and page. No process of it is left, nor a file."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={script.ranks}"]
    doctor = ["-m", "labs.doctor", "--out", str(tmp_path / "out"), "--steps", str(STEPS), "--seconds", "15"]
    command = [sys.executable, "-B", *(torchrun if script.ranks else []), *doctor, Path(script.path).name]
    scratch = tmp_path / "t"  # its path is short, as that of a socket must be
    scratch.mkdir()
    environment = new_environment(TMPDIR=str(scratch), OMP_NUM_THREADS="1", **script.environment)
    environment.pop("PYTHONWARNINGS", None)  # of conftest.py: errors in `__main__`, which is a public script here
    root = str(tmp_path / "repository")  # minGPT is a package there
    environment["PYTHONPATH"] = os.pathsep.join([str(STAND_INS), root, environment["PYTHONPATH"]])
    try:
        done = subprocess.run(
            [*command, *shlex.split(script.args)],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )
        assert_no_survivors(environment[MARK])
    finally:
        for process in family(environment[MARK]):
            process.kill()
    left = [p.name for p in scratch.iterdir() if not p.name.startswith(("torchelastic_", "torchinductor_"))]  # torch's
    assert left == []
    return done.returncode, done.stdout + done.stderr


def _assert_seen(script, facts, said):
    assert facts.ended == "done" and facts.stage == "done", said
    assert len(facts.step_s) == STEPS
    for kind in ("forward", "backward", "optimizer"):
        assert sum(facts.spans_s.get(kind, [])) > 0, f"no {kind}"
    assert tuple(o["kind"] for o in facts.training["optimizers"]) == script.optimizers
    assert (facts.loader.dataset if facts.loader else "") == script.dataset
    assert facts.samples or not script.dataset
    tried = [mode for mode, turns in facts.turns_s.items() if mode != AS_IS and any(turns)]
    assert tried or any("too short" in why for why in facts.left_out.values()), said


def _line(where: str) -> int:
    return int(where.split("  ")[0].split(":")[1])
