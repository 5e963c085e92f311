"""Every command in README.md, INSTRUCTOR.md and docs/INSTALL.md is run as it stands there, or says who runs it instead.

Commands of labs run in this process: their ranks then come from its warm fork server. They get a `--smoke` where the
lab has one, a model that exists for `my_package...`, and folders of the test for /srv/room and /srv/queue.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat import write
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from processes import SLOWER, new_environment, wait_for

from labs.kit import host

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "INSTRUCTOR.md", "docs/INSTALL.md")
WORDS = "make|python|torchrun|docker|conda|pip|jupyter|git|ssh|source|mkdir|sudo|sbatch|kubectl|rm"
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{WORDS}) \S.*")

# A command that is not run here: what it needs, and the test that shows as much of it as can be shown.
REPOSITORY = "tests/test_repository.py::"
ELSEWHERE = {
    r"(COURSE_\w+=1 )?make (test|drills)\b": ("this run", REPOSITORY + "test_make_knows_and_explains_each_command"),
    r"make lab PYTHON=": ("another Python", REPOSITORY + "test_make_says_in_one_line_that_python_is_missing"),
    r"make lab PIP_ARGS=": ("a package index", REPOSITORY + "test_make_knows_and_explains_each_command"),
    r"python -m labs.start": (
        "JupyterLab until it is stopped",
        "tests/test_browser.py::test_a_fresh_start_opens_a_copy_without_outputs",
    ),
    r"python -m labs.kit.copies": ("it writes my/", "tests/test_copies.py::test_a_copy_is_made_once"),
    r"python -m labs.kit.course$": ("all notebooks", "tests/test_notebooks.py::test_course_goes_on_after_a_failure"),
    r"make book": ("Sphinx and a theme", "tests/test_book.py::test_no_link_is_broken"),
    r"make notebooks": ("it measures", "tests/test_fingerprint.py::test_rerun_stamps_what_ran"),
    r"make constraints": ("a package index", REPOSITORY + "test_constraints_pin_every_dependency_within_its_bounds"),
    r"docker (build|run)": ("Docker", "tests/test_container_image.py::test_"),
    r"(conda|pip)": ("an environment", REPOSITORY + "test_environment_yml_holds_python_and_the_list"),
    r"sbatch": ("Slurm", "tests/test_cluster.py::test_the_batch_file_trains_on_two_machines"),
    r"kubectl": ("Kubernetes", "tests/test_cluster.py::test_pods_that_are_killed_come_back"),
    r"(python|torchrun --nproc-per-node 2) labs/recipes/": (
        "the recipes' own tests",
        "tests/test_recipes.py::test_two_ranks_train_what_one_process_trains",
    ),
    r"python -m labs.gpu_acceptance": (
        "a GPU for ten minutes",
        "tests/test_gpu_acceptance.py::test_pretending_passes_every_step",
    ),
    r"(python|torchrun --nproc-per-node 2) -m labs.doctor train.py": (
        "a script of one's own",
        "tests/test_doctor.py::test_the_page_is_printed_and_the_report_is_written",
    ),
    r"python -m labs.postmortem FOLDER": (
        "a hang's dumps",
        "tests/test_postmortem.py::test_the_command_answers_first_and_its_exit_code_says_whether_it_knows",
    ),
    r"ssh ": ("another machine", "tests/test_browser.py::server"),
    r"python -m labs.classroom.instructor": (
        "it writes INSTRUCTOR.md",
        "tests/test_agenda.py::test_the_page_is_computed",
    ),
    r"(sudo|rm -rf|git|source)": ("it changes this machine or checkout", REPOSITORY + "make"),
}


def blocks(text):
    """What stands in the code blocks of commands; a block of Python is somebody else's."""
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [block for language, block in found if not language]


def commands():
    """(page, command) of every line in a code block and every piece of inline code that is a command."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [line.split("  #")[0].strip() for block in blocks(text) for line in block.splitlines()]
        yield from ((page, line) for line in dict.fromkeys([*lines, *inline]) if COMMAND.fullmatch(line))


COMMANDS = list(dict.fromkeys(command for _, command in commands()))
HERE = [c for c in COMMANDS if not any(re.match(pattern, c) for pattern in ELSEWHERE)]


def test_every_line_of_a_code_block_is_a_command():
    for page in PAGES:
        for block in blocks((ROOT / page).read_text()):
            assert [line for line in block.splitlines() if line.strip() and not COMMAND.match(line.strip())] == []


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_a_command_that_is_not_run_here_names_a_test_that_exists(pattern):
    assert any(re.match(pattern, c) for c in COMMANDS), "no page has such a command: remove the line"
    file, _, name = ELSEWHERE[pattern][1].partition("::")
    assert f"def {name}" in (ROOT / file).read_text()


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Folders for /srv/room and /srv/queue; what commands write goes into a folder of the test."""
    for name in ("room", "queue"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(command, folder):
    """The words of a command, its environment first taken off, with names and folders that exist here."""
    command = re.sub(r"(?<=--)(model|dataset) my_package\.\w+:factory", r"\1 labs_for_tests.workloads:\1", command)
    command = command.replace("/srv/", f"{folder}/").replace("/var/tmp/course-queue", str(folder / "queue"))
    words = shlex.split(command.replace("build/minutes.json", str(folder / "minutes.json")))
    variables = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
    return [w for w in words if not re.match(r"[A-Z_]+=", w)], variables


TRIED = {
    "python -m labs.debug_cost --nproc 1",
    "python -m labs.hardware_probe --preflight",
    "python -m labs.timing --nproc 1",
    "python -m labs.data_parallel",
    "python -m labs.data_parallel --nproc 2",
    "python -m labs.data_parallel --seconds 30",
    "make slides",
    'make slides ARGS="--solutions 03.1 03.2"',
    "make course",
    "make lab",
    "make lab START=03",
    'make lab LAB_ARGS="--allow-root"',
    'make lab LAB_ARGS="--no-browser"',
    "make lab START=notebooks/03_dataparallel_vs_ddp.ipynb",
}
"""Those of which another test of `make test` runs the same with other options, or as they are: test_room_preflight."""


def here(pattern):
    """Commands that begin with it, after their variables."""
    found = [c for c in HERE if re.match(rf"(?:[A-Z_]+=\S+ )*{pattern}", c)]
    return [pytest.param(c, marks=pytest.mark.long if c in TRIED else ()) for c in found]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", here("python -m "))
def test_python_command(command, room, monkeypatch, capsys):
    words, variables = prepared(command, room)
    module, arguments = words[2], words[3:]
    if module == "labs.classroom.agenda":
        (room / "minutes.json").write_text('{"01_timing": [{"section": "1. A", "seconds": 3.0, "cells": 1}]}')
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
    if module == "labs.seats" and host.core_count() < 2:
        assert code == 2 and "2 ranks need 2 cores and this machine has 1" in said
        return
    assert not code, said


def run(module, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    # typing looks names up in sys.modules["__main__"], and labs ask it what they are called.
    runpy.run_module(module, run_name="__main__", alter_sys=True)


SMOKE = {f"labs.{p.stem}" for p in (ROOT / "labs").glob("*.py") if re.search(r"^    smoke: bool", p.read_text(), re.M)}


@pytest.mark.long  # test_rank_shell has a lab under torchrun
@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("torchrun")])
def test_torchrun_command(command, room):
    words, _ = prepared(command, room)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words[1:], "--smoke"]
    done = subprocess.run(
        torchrun, cwd=room, env=new_environment(), capture_output=True, text=True, timeout=250 * SLOWER
    )
    assert done.returncode == 0 and "step_s" in done.stdout, done.stderr


@pytest.mark.parametrize("command", here("make (course|slides|lab)"))
def test_make_command(command, room):
    """`make course` on a course of one cell, `make slides` of one notebook, `make lab` until it answers."""
    if not (ROOT / ".venv" / ".ready").exists():
        pytest.skip("make has not set up .venv in this checkout")
    words, variables = prepared(command, room)
    given = next((w.removeprefix("ARGS=") for w in shlex.split(command) if w.startswith("ARGS=")), "")
    environment = new_environment(**{k: v for k, v in variables.items() if k.startswith("COURSE_")})
    environment = {k: v for k, v in environment.items() if not k.startswith(("MAKE", "MFLAGS"))}
    target = words[1]
    if target == "lab":
        return answers(variables, environment, room)
    (room / "notebooks").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# Try"), new_code_cell("SOLUTIONS = False", metadata={"tags": ["parameters"]})]
    write(new_notebook(cells=[*cells, new_code_cell("print(1)")], metadata=kernel), room / "notebooks" / "00_try.ipynb")
    own = {
        "course": f"--notebooks {room / 'notebooks'} --out {room / 'build'}",
        "slides": f"01_timing --out {room / 'slides'}",
    }[target]
    if "--source build" in given:
        given = f"--source {shlex.quote(str(ROOT / 'notebooks'))}"
    make = ["make", target, f"ARGS={own} {given}"]
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250 * SLOWER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (room / "build" / "index.html").exists() or (room / "slides" / "01_timing.html").exists()


def answers(variables, environment, room):
    """JupyterLab starts, with a token, and ends when it is told to."""
    options = "--no-browser --port 0 --allow-root" + (" " + variables["LAB_ARGS"] if "LAB_ARGS" in variables else "")
    options = options.replace("--port 9000", "")
    environment |= {"JUPYTER_RUNTIME_DIR": str(room / "runtime"), "LAB_ARGS": options}
    environment |= {"START": variables["START"]} if "START" in variables else {}
    with open(room / "log", "w+") as log:
        streams = {"stdout": log, "stderr": log}
        lab = subprocess.Popen(["make", "lab"], cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            wait_for(lambda: re.search(r"http://\S+\?token=\w+", (room / "log").read_text()), what="JupyterLab's link")
        finally:
            os.killpg(lab.pid, 15)
            lab.wait(20)


@pytest.mark.parametrize("command", [c for c in HERE if c.startswith("mkdir")])
def test_other_command(command, room):
    words, _ = prepared(command, room)
    assert subprocess.run([*words[:-1], words[-1] + "-new"], cwd=room).returncode == 0


def test_every_command_is_run_by_one_of_these():
    kinds = (r"python -m ", r"torchrun", r"make (course|slides|lab)", r"mkdir")
    assert [c for c in HERE if not any(re.match(rf"(?:[A-Z_]+=\S+ )*{kind}", c) for kind in kinds)] == []
