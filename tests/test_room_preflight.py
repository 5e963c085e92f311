"""The preflight for a room: its checks on made-up trouble, and the command, on this machine and on a broken copy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import processes
import pytest

from labs.classroom import room_preflight
from labs.classroom.room_preflight import KernelTrial, Report, Started, Trial, guarded
from labs.kit.preflight import Check

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "labs.hardware_probe", "--preflight"]


@pytest.fixture
def checkout(tmp_path):
    """The files that the checks of the course read, and nothing else."""
    for name in ("README.md", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    shutil.copytree(ROOT / "labs/common/data", tmp_path / "labs/common/data")
    return tmp_path


def test_a_damaged_checkout_is_named_file_by_file(checkout):
    assert {room_preflight.notebooks(checkout).status, room_preflight.data(checkout).status} == {"pass"}
    (checkout / "notebooks/01_timing.ipynb").unlink()
    (checkout / "notebooks/02_dataloader_tuning.ipynb").write_text("{")
    (checkout / "labs/common/data/moby_dick.txt").write_text("Call me Ishmael!")
    notebooks, data = room_preflight.notebooks(checkout), room_preflight.data(checkout)
    assert notebooks.status == data.status == "fail" and "moby_dick.txt" in data.detail
    assert "01_timing.ipynb, 02_dataloader_tuning.ipynb" in notebooks.detail


def test_missing_and_other_packages_are_named(checkout, monkeypatch):
    versions = {"numpy": "1.26", "matplotlib": None}
    installed = room_preflight.version
    monkeypatch.setattr(room_preflight, "version", lambda name: versions.get(name, installed(name)))
    found = room_preflight.packages(checkout)
    assert found.status == "fail" and "matplotlib" in found.detail
    del versions["matplotlib"]
    found = room_preflight.packages(checkout)
    assert found.status == "warn" and "numpy 1.26 (tested" in found.detail


def test_trouble_with_the_machine_comes_with_a_fix(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        taken = room_preflight.port(s.getsockname()[1])
    found = [
        taken,
        room_preflight.quiet(35.0),
        room_preflight.settings({"CUDA_LAUNCH_BLOCKING": "1"}),
        room_preflight.course_place(Path("/mnt/c/course"), "WSL"),
    ]
    assert all(c.status == "warn" and c.remedy for c in found), found
    assert room_preflight.port(0).status == room_preflight.quiet(3.0).status == "pass"
    assert room_preflight.folder_problem(tmp_path / "not" / "yet") == "" and list(tmp_path.iterdir()) == []
    assert "needed" in room_preflight.folder_problem(tmp_path, 2**62)


def test_ranks_start_on_what_there_is():
    assert room_preflight.plans(0, 4) == [(2, "cpu")] and room_preflight.plans(1, 0) == [(2, "cpu"), (1, "cuda")]
    assert room_preflight.plans(8, 0) == [(2, "cuda")] and room_preflight.plans(4, 8) == [(4, "cuda")]


def test_a_kernel_that_fails_to_start_reports_its_last_line(tmp_path, monkeypatch):
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-S", "-c", "import no_such_module"], "display_name": "x", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    found = KernelTrial(tmp_path, 10).run()
    assert found.status == "fail" and "no_such_module" in found.detail


def test_a_check_that_raises_is_a_warning_with_its_name():
    (found,) = guarded("port", lambda: 1 / 0)
    assert (found.name, found.status) == ("port", "warn") and "ZeroDivisionError" in found.detail and found.remedy


@pytest.mark.drill
def test_a_check_that_hangs_is_left_after_its_limit():
    end = threading.Event()
    try:
        (found,) = Started(Trial("kernel", lambda: [end.wait(60)], 0.1)).result()
    finally:
        end.set()
    assert (found.status, found.detail) == ("warn", "no answer after 0.1 s")


def test_the_verdict_comes_first_and_last():
    checks = [
        Check(n, s, "a detail", "run: x" * (s != "pass")) for n, s in zip("abc", ("pass", "fail", "warn"), strict=True)
    ]
    lines = Report(checks, "0123456789ab", "Ada").as_text("build/preflight.json").splitlines()
    assert lines[0] == lines[-1] and lines[0].strip("= ") == "NO-GO: fix b; 1 warning"
    assert sum("-> run: x" in line for line in lines) == 2
    assert Report(checks[:1]).headline == "GO: ready for the course"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "3"], "--rounds does not go with --preflight"),
        (["--require-gpus", "-1"], "at least 0"),
        (["--report", "."], "--report"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as e:
        room_preflight.parse(["--preflight", *arguments])
    said = capsys.readouterr().err
    assert e.value.code == 2 and words in said and len(said.strip().splitlines()) == 1


def test_a_healthy_machine_gets_a_go_and_its_room_a_report_without_secrets(tmp_path):
    secret, room = "s3cr3t-" + tmp_path.name, tmp_path / "room"
    room.mkdir()
    environment = processes.new_environment(COURSE_ROOM=str(room), COURSE_NAME="Ada", HF_TOKEN=secret)
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=250, cwd=ROOT, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == lines[-1] and "GO: ready for the course" in lines[0], done.stdout
    assert done.stderr == ""
    (file,) = room.rglob("*.*")
    said = json.loads(file.read_text())
    assert file.relative_to(room) == Path("Ada/preflight.json") and said["name"] == "Ada"
    assert said["course"] in lines[1] and len(said["course"]) == 12 and said["machine"]["cores"] >= 1
    assert {c["name"] for c in said["checks"] if c["status"] == "pass"} >= {"kernel", "all-reduce", "data"}
    text = file.read_text() + done.stdout
    assert not [word for word in (secret, str(tmp_path), socket.gethostname(), str(ROOT)) if word in text]
    processes.assert_no_survivors(environment[processes.MARK])


def test_a_python_without_any_package_is_told_what_to_type(tmp_path):
    """The first command of somebody who has cloned and installed nothing; -S hides what is installed."""
    command = [sys.executable, "-S", *COMMAND[1:], "--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stderr
    assert "NO-GO" in done.stdout.splitlines()[0] and "run: make lab (it installs what is missing)" in done.stdout


@pytest.mark.drill
def test_an_interrupted_preflight_leaves_nothing_behind(tmp_path):
    environment = processes.new_environment(TMPDIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime"))
    command = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    with command:
        processes.wait_for(lambda: list((tmp_path / "runtime").glob("kernel-*")), what="the kernel")
        os.kill(command.pid, signal.SIGTERM)
        _, err = command.communicate(timeout=250)
    assert command.returncode == 130 and b"Traceback" not in err
    processes.assert_no_survivors(environment[processes.MARK])
    assert list((tmp_path / "runtime").glob("kernel-*")) == [] and processes.leftovers(tmp_path) == set()
