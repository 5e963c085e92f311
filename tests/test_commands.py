"""Every `python -m` command in README.md and INSTRUCTOR.md is run as it stands there, but for those that cannot be.

Commands of labs run in this process: their ranks then come from its warm fork server. They get a `--smoke` where the
lab has one, a model that exists for `my_package...`, and a folder of the test for /srv/room.
"""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import new_environment

from labs.kit.lab import experiments

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "INSTRUCTOR.md",
    "docs/INSTALL.md",
    "docs/COMMANDS.md",
    "docs/WATCH.md",
    "docs/TROUBLESHOOTING.md",
)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*python -m \S.*")
# Commands that are not run here: they need a network, a GPU or another machine, or have tests of their own.
ELSEWHERE = (
    r"python -m labs.(start|gpu|kit.copies)\b",
    r"python -m labs.kit.course$",
    r"python -m labs.(doctor|watch) train.py",
    r"python -m labs.postmortem FOLDER",
    r"python -m labs.symptom",
)


def blocks(text):
    """What stands in the code blocks of commands; a block of Python is somebody else's."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


def commands():
    """Every line in a code block and every piece of inline code that is a command."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [line.split("  #")[0].strip() for block in blocks(text) for line in block.splitlines()]
        yield from (line for line in dict.fromkeys([*lines, *inline]) if COMMAND.fullmatch(line))


HERE = [c for c in dict.fromkeys(commands()) if not any(re.match(pattern, c) for pattern in ELSEWHERE)]


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder for /srv/room; what commands write goes into a folder of the test."""
    (tmp_path / "room").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(command, folder):
    """The words of a command, its environment first taken off, with names and folders that exist here."""
    command = re.sub(r"(?<=--)((model|dataset)s?) my_package\.\w+:factory", r"\1 labs_for_tests.workloads:\2", command)
    command = command.replace("/srv/", f"{folder}/")
    words = shlex.split(command)
    variables = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
    return [w for w in words if not re.match(r"[A-Z_]+=", w)], variables


TRIED = {
    "python -m labs.claims",
    "python -m labs.hardware_probe",
    "python -m labs.hardware_probe --preflight",
    "python -m labs.measure_validation --nproc 1",
    "python -m labs.timing --nproc 1",
    "python -m labs.data_parallel",
    "python -m labs.data_parallel --nproc 2",
    "python -m labs.data_parallel --rounds 40",
}
"""Those of which another test of `make test` runs the same with other options, or as they are: test_room_preflight."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.long if c in TRIED else ()) for c in HERE])
def test_python_command(command, room, monkeypatch, capsys):
    words, variables = prepared(command, room)
    module, arguments = words[2], words[3:]
    if "--preflight" in arguments:  # it ends the fork server that it has timed
        arguments += ["--report", str(room / "preflight.json")]
        subprocess.run([sys.executable, *words[1:3], *arguments], cwd=room, env=new_environment(), check=True)
        return
    if module in SMOKE:
        arguments.append("--smoke")
    if "--watch" in arguments:  # for ever: once is enough here
        arguments = arguments[: arguments.index("--watch")]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    try:
        code = run(module, monkeypatch)
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr().err
    assert not code, said


def run(module, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    # typing looks names up in sys.modules["__main__"], and labs ask it what they are called.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def takes_smoke(path):
    """Whether an experiment has a parameter for short runs; a folder's Config may be in any of its files."""
    files = [path] if path.parent.name == "labs" else path.parent.glob("*.py")
    return any(re.search(r"^    smoke: bool", file.read_text(), re.M) for file in files)


SMOKE = {f"labs.{name}" for name, path in experiments().items() if takes_smoke(path)}
