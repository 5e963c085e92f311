"""The preflight for a room: every outcome of every check, from made-up facts; what it says; a checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from labs.classroom import course_checks, jupyter_checks, place_checks, ranks_trial, system_checks, verdict
from labs.classroom.course_checks import CourseFiles, Packages
from labs.classroom.jupyter_checks import Kernel
from labs.classroom.system_checks import Clock
from labs.kit.preflight import Check, Started, Trial, guarded


def as_list(found) -> list[Check]:
    return found if isinstance(found, list) else [found]


# -- every outcome: (what is judged, status, a word of the detail, a word of the remedy)

GOOD_KERNEL = {"seconds": 1.0, "prefix": "/venv", "shown": True}
CLOCK = {"now_s": 2e9, "commit_s": 1.9e9, "tick_s": 1e-9}
PINS = {"numpy": "2.4.1", "scipy": "1.16"}
TORCH, OTHER_TORCH = {"torch": "2.13.0"}, {"numpy": "2.0", "torch": "2.9.0+cu128"}
OUTCOMES = {
    "kernel answers": (jupyter_checks.kernel(Kernel(**GOOD_KERNEL), "/venv"), "pass", "1.0 s", ""),
    "kernel dies": (jupyter_checks.kernel(Kernel(problem="Kernel died")), "fail", "Kernel died", "rm -rf .venv"),
    "kernel lacks labs": (
        jupyter_checks.kernel(Kernel(problem="ModuleNotFoundError: No module named 'labs'")),
        "fail",
        "labs",
        "make lab",
    ),
    "kernel of another Python": (
        jupyter_checks.kernel(Kernel(**GOOD_KERNEL), "/other"),
        "fail",
        "another Python",
        "JUPYTER_PREFER_ENV_PATH",
    ),
    "JupyterLab is broken": (jupyter_checks.jupyterlab("ImportError: jinja2"), "fail", "jinja2", "make lab"),
    "port is taken": (jupyter_checks.port("taken"), "warn", "8888 is taken", "--port 9000"),
    "cores are busy": (system_checks.quiet(35.0), "warn", "35 %", "close"),
    "a firewall": (system_checks.connection("no connection within 5 s", "Linux"), "fail", "5 s", "iptables"),
    "clock is in the past": (system_checks.clock(Clock(**CLOCK | {"now_s": 1e9}), "WSL"), "warn", "2001", "hwclock"),
    "clock is moved": (system_checks.clock(Clock(**CLOCK, moved_s=-3.0)), "warn", "-3.0 s", ""),
    "timer is coarse": (system_checks.clock(Clock(**CLOCK | {"tick_s": 1e-3})), "warn", "1000 us", "another machine"),
    "hardly any processes": (system_checks.processes(20), "fail", "20", "--pids-limit"),
    "few processes": (system_checks.processes(300), "warn", "300", "ulimit -u"),
    "settings": (system_checks.settings({"CUDA_LAUNCH_BLOCKING": "1"}), "warn", "CUDA_LAUNCH", "unset CUDA_LAUNCH"),
    "slow first launch": (system_checks.first_launch(40.0, 0.5), "warn", "40.0 s", "local disk"),
    "course on a Windows disk": (place_checks.course_place(Path("/mnt/c/course"), "WSL"), "warn", "Windows", "cp -r"),
    "my/ is read-only": (place_checks.folders({"my": "Read-only"}), "fail", "Read-only", "chmod"),
    "room": (place_checks.room(True, ""), "pass", "takes files", ""),
    "room is not mounted": (place_checks.room(True, "no folder /x here"), "warn", "no folder", "mount"),
    "all notebooks": (course_checks.notebooks(CourseFiles(7)), "pass", "7, as committed", ""),
    "a notebook is missing": (
        course_checks.notebooks(CourseFiles(7, missing=("notebooks/03.ipynb",))),
        "fail",
        "missing: 03.ipynb",
        "git checkout -- notebooks/03.ipynb",
    ),
    "a notebook was edited": (
        course_checks.notebooks(CourseFiles(7, modified=("notebooks/03.ipynb",))),
        "warn",
        "03.ipynb",
        "git checkout -- notebooks/03.ipynb (your answers",
    ),
    "a lab was edited": (course_checks.code(CourseFiles(7, code=("labs/ä.py",))), "warn", "ä.py", "-- labs/ä.py"),
    "damaged data": (course_checks.data(("labs/common/data/moby_dick.txt",), 11), "fail", "moby", "git checkout"),
    "packages": (course_checks.versions(Packages(PINS, PINS)), "pass", "2 as tested", ""),
    "a package is missing": (
        course_checks.versions(Packages(PINS, {"numpy": None}, frozenset({"numpy"}))),
        "fail",
        "not installed in this Python: numpy",
        "make lab",
    ),
    "a package is another": (
        course_checks.versions(Packages(PINS, PINS | {"numpy": "1.26"})),
        "warn",
        "1 of 2 differ from constraints.txt: numpy 1.26 (tested 2.4.1)",
        "run: python -m pip",
    ),
    "a package and torch": (
        course_checks.versions(Packages(PINS | TORCH, PINS | OTHER_TORCH)),
        "warn",
        "numpy 2.0 (tested 2.4.1)",
        "go on",
    ),
    "ranks fail": (
        ranks_trial.failed(RuntimeError("Traceback\nRuntimeError: x\nrank 1 failed first.")),
        "fail",
        "rank 1 failed first.",
        "--smoke",
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_each_outcome_says_what_is_and_what_to_do(case):
    (check,) = as_list(OUTCOMES[case][0])
    _, status, words, remedy = OUTCOMES[case]
    assert check.status == status and words in check.detail and remedy in check.remedy
    assert bool(check.remedy) == (status != "pass"), "a remedy if, and only if, there is something to mend"
    assert "\n" not in check.detail + check.remedy


def test_ranks_start_on_what_there_is():
    assert ranks_trial.plans(0, 4) == [(2, "cpu")] and ranks_trial.plans(1, 0) == [(2, "cpu"), (1, "cuda")]
    assert ranks_trial.plans(8, 0) == [(2, "cuda")] and ranks_trial.plans(4, 8) == [(4, "cuda")]


# -- checks that raise or hang


def test_a_check_that_raises_is_a_warning_with_its_name():
    (found,) = guarded("port", lambda: 1 / 0)
    assert (found.name, found.status) == ("port", "warn") and "ZeroDivisionError" in found.detail and found.remedy


@pytest.mark.drill
def test_a_check_that_hangs_is_left_after_its_limit():
    end, ended = threading.Event(), []
    verdicts = [Check("kernel", "fail", "silent", "do x"), None]
    late = [Started(Trial("kernel", lambda: ended.append(end.wait(60)), 0.1, v)) for v in verdicts]
    try:
        (told,), (default,) = (s.result() for s in late)
        assert ended == [], "the answer came while both still hung"
    finally:
        end.set()
    assert told.detail == "silent" and (default.status, default.detail) == ("warn", "no answer after 0.1 s")


# -- what it says


def report(*statuses: str) -> verdict.Report:
    found = [Check(f"check {i}", s, "a detail " * 2, "" if s == "pass" else "run: x") for i, s in enumerate(statuses)]
    return verdict.Report(found, "0123456789ab", "Ada", "2026-11-01T00:00:00+00:00", 7.9)


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        (["pass"] * 30, "GO: ready for the course"),
        (["warn", "fail", "fail"], "NO-GO: 2 things to mend: check 1, check 2, with 1 warning"),
    ],
)
def test_the_verdict_comes_first_and_last_on_one_screen(statuses, sentence):
    lines = verdict.as_text(report(*statuses), 80, saved="build/preflight.json").splitlines()
    assert lines[0] == lines[-1] and lines[0].strip("= ") == sentence
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "0123456789ab" in lines[1] and "Ada" in lines[1]
    for n in range(len(statuses)):
        assert any(f"check {n}" in line for line in lines[1:-1])
    assert sum("-> run: x" in line for line in lines) == len(statuses) - statuses.count("pass")


# -- reading a checkout


@pytest.fixture
def checkout(tmp_path):
    """A small course in git: two notebooks, a data file, a lab."""
    if not shutil.which("git"):
        pytest.skip("needs git")
    cell = {"cell_type": "code", "source": ["1 + 1"], "metadata": {}, "outputs": []}
    files = {
        "README.md": "[a](notebooks/00_a.ipynb) [b](notebooks/01_b.ipynb)",
        "notebooks/00_a.ipynb": json.dumps({"cells": [cell]}),
        "notebooks/01_b.ipynb": json.dumps({"cells": [cell]}),
        "labs/lab.py": "x = 1\n",
        "labs/common/data/text.txt": "Call me Ishmael.",
        "labs/common/data/SHA256SUMS": "39229f163d6b16d7ef0dbb9d7cdc2c8b4cd2d4ed9d8d7a0d7d0d4f4d7f2f9c3b  ./text.txt\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    digest = course_checks._sha256(tmp_path / "labs/common/data/text.txt")
    (tmp_path / "labs/common/data/SHA256SUMS").write_text(f"{digest}  ./text.txt\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "-m", "x")
    return tmp_path


def git(root, *arguments):
    subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True)


def test_a_fresh_checkout_is_as_committed(checkout):
    assert course_checks.course_files(checkout) == CourseFiles(2)
    assert course_checks.damaged_data(checkout) == ((), 1)
    assert abs(course_checks.commit_s(checkout) - (checkout / ".git" / "HEAD").stat().st_mtime) < 600


def test_what_was_changed_is_found_and_a_saved_run_is_no_change(checkout):
    first, second = (checkout / "notebooks" / name for name in ("00_a.ipynb", "01_b.ipynb"))
    ran = json.loads(first.read_text())
    ran["cells"][0] |= {"outputs": [{"output_type": "stream", "text": "2"}], "execution_count": 1}
    first.write_text(json.dumps(ran))
    (checkout / "labs/common/data/text.txt").write_text("Call me Ishmael!")
    assert course_checks.course_files(checkout) == CourseFiles(2)
    assert course_checks.damaged_data(checkout) == (("labs/common/data/text.txt",), 1)
    ran["cells"][0]["source"] = ["1 + 2"]
    first.write_text(json.dumps(ran))
    second.unlink()
    (checkout / "labs/lab.py").write_text("x = 2\n")
    found = course_checks.course_files(checkout)
    assert found == CourseFiles(2, ("notebooks/01_b.ipynb",), (), ("notebooks/00_a.ipynb",), ("labs/lab.py",))
    first.write_text("{")
    assert course_checks.course_files(checkout).unreadable == ("notebooks/00_a.ipynb",)


def test_a_copy_without_git_still_knows_its_notebooks(checkout):
    shutil.rmtree(checkout / ".git")
    (checkout / "notebooks/00_a.ipynb").unlink()
    assert course_checks.course_files(checkout) == CourseFiles(2, ("notebooks/00_a.ipynb",), compared=False)
    assert course_checks.commit_s(checkout) is None
