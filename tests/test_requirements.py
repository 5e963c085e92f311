"""A machine that has a torch of its own: the oldest one that is accepted, and files that install the course there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fakes import FakeNvml, card
from test_machine_checks import BUILD, facts, one, trouble

from labs import start
from labs.kit import requirements

ROOT = Path(__file__).parents[1]
PIN = requirements.tested()
PAGE = (ROOT / "docs" / "COLAB.md").read_text("utf-8")


def test_versions_are_compared_as_numbers():
    assert requirements.numbers("2.10.0") == (2, 10) and requirements.numbers("unknown") == ()
    assert requirements.numbers("2.9.0a0+50eac811.nv25.09") == (2, 9)


def test_too_old_a_torch_ends_the_start_before_jupyterlab_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(requirements, "installed", lambda name: "2.0.1+cu118")
    monkeypatch.setattr(start, "opened", lambda name: pytest.fail("it went on"))
    monkeypatch.setattr(sys, "argv", ["labs.start"])
    with pytest.raises(SystemExit, match="2"):
        start.main()
    said = capsys.readouterr().err
    assert said.startswith("python -m labs.start: torch 2.0.1+cu118 is older than") and said.count("\n") == 1


def test_a_torch_without_an_installer_is_found_by_its_own_file(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("from typing import Optional\n__version__ = '2.9.0a0+git1a2b'\n")
    asked = "from labs.kit import requirements; print(requirements.installed('torch'))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-c", asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2.9.0a0+git1a2b"


def test_without_its_repository_nobody_knows_the_oldest_torch(tmp_path):
    assert requirements.torch_problem("1.0", tmp_path) == ""


# -- the commands alone, beside a training

BASE = {"torch", "numpy", "scipy", "psutil"}
IN_BASE = """
import importlib, sys
import torch, numpy, scipy, psutil  # and what these need themselves
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "labs", "torch", "numpy", "scipy", "psutil"}:
            raise ModuleNotFoundError(f"{name} is not of the base", name=name)
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
COMMANDS = ("labs.doctor.__main__", "labs.watch.__main__")
LATER = (
    "doctor.report doctor.compare doctor.script_process doctor.counterfactuals doctor.supervisor watch.watchdog".split()
)


def test_the_commands_need_four_packages():
    listed = requirements.project()["project"]
    assert {re.match(r"[\w-]+", line)[0] for line in listed["dependencies"]} == BASE
    assert listed["scripts"] == {f"train-{name.split('.')[1]}": f"{name}:main" for name in COMMANDS}
    assert f"torch>={requirements.project()['tool']['course']['oldest-torch']}" in listed["dependencies"]
    modules = [*COMMANDS, *(f"labs.{name}" for name in LATER), "labs.postmortem"]
    command = [sys.executable, "-c", IN_BASE, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["doctor", "watch"])
def test_a_command_names_itself_and_finds_a_module_in_the_users_folder(name, tmp_path):
    """What pip writes into the environment's bin."""
    command = tmp_path / "bin" / f"train-{name}"
    command.parent.mkdir()
    command.write_text(f"import sys; sys.path.append({str(ROOT)!r}); from labs.{name}.__main__ import main; main()")
    here = tmp_path / "here"
    (here / "pkg").mkdir(parents=True)

    def run(*words):
        return subprocess.run([sys.executable, command, *words], cwd=here, capture_output=True, text=True)

    shown = run("--help").stdout
    assert shown.startswith(f"usage: train-{name} [") and f"python -m labs.{name}" not in shown
    wrong = run("none.py")
    assert (wrong.returncode, wrong.stderr) == (2, f"train-{name}: there is no script none.py\n")
    (here / "pkg" / "train.py").write_text("import pkg; print('trained')")
    assert run(*(["--show-output", "--seconds", "0"] * (name == "doctor")), "-m", "pkg.train").stdout.count("trained")
    (here / "labs.py").touch()
    refused = run("-m", "pkg.train")
    assert refused.returncode == 2 and f"{here}/labs.py has the same name" in refused.stderr


# -- two T4, as on Kaggle


def build(torch: str) -> dict:
    return BUILD | {"torch": torch, "arch_list": ["sm_75", "sm_80", "sm_90"]}


def test_the_preflight_accepts_another_torch_and_refuses_one_too_old():
    two_t4 = [FakeNvml([card(f"GPU-000{n}", "Tesla T4", capability=(7, 5)) for n in (1, 2)]) for _ in range(3)]
    status, detail = one(facts(two_t4[0], build("2.11.0+cu128"), require_gpus=2))
    assert status == "warn" and f"2.11.0+cu128, tested with {PIN}" in detail
    assert trouble(facts(two_t4[1], build(PIN), require_gpus=2)) == {}
    status, detail = one(facts(two_t4[2], build("2.0.1+cu118"), require_gpus=2))
    assert status == "fail" and "is older than" in detail


# -- Colab, Kaggle, Codespaces, Binder

PIP = """
import os, sys
words = sys.argv[1:]
print(words, open(words[words.index("-c") + 1]).read().split(), file=open(os.environ["ASKED"], "a"))
"""


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_the_cell_of_the_page_imports_labs_and_pip_may_not_touch_torch(tmp_path):
    """pip is a stand-in that writes down what it is asked for."""
    repository = tmp_path / "repository"
    (repository / "labs").mkdir(parents=True)
    (repository / "labs" / "__init__.py").touch()
    (repository / "notebooks").mkdir()
    (repository / "notebooks" / "a.ipynb").touch()
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "site" / "pip").mkdir(parents=True)
    (tmp_path / "site" / "pip" / "__init__.py").touch()
    (tmp_path / "site" / "pip" / "__main__.py").write_text(PIP)
    cell = re.search(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
    cell = cell.replace("/tmp/", f"{tmp_path}/").replace("https://github.com/OWNER/NAME", repository.as_uri())
    script = f"{cell}\nimport labs; print(labs.__file__, os.getcwd())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "ASKED": str(tmp_path / "asked")}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    course = tmp_path / "course"
    assert done.stdout.split() == [str(course / "labs" / "__init__.py"), str(course / "notebooks")]
    asked = (tmp_path / "asked").read_text()
    assert f"'torch=={torch.__version__}'" in asked and "'psutil>=" in asked
