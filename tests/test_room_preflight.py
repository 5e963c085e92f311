"""The preflight for a room on this machine: kernels, ports, folders, and the command itself, whole and broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import processes
import pytest

from labs.classroom import jupyter_checks, room_preflight, system_checks
from labs.classroom.jupyter_checks import KernelTrial

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "labs.hardware_probe", "--preflight"]

# -- trying things


@pytest.fixture
def kernel_that(tmp_path, monkeypatch):
    """A trial of a kernel named python3 that runs `code` in place of ipykernel."""

    def make(code: str, limit_s: float) -> KernelTrial:
        folder = tmp_path / "kernels" / "python3"
        folder.mkdir(parents=True)
        spec = {"argv": [sys.executable, "-S", "-c", code], "display_name": "x", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec))
        (tmp_path / "notebooks").mkdir()
        monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
        return KernelTrial(tmp_path, limit_s)

    return make


def test_a_kernel_that_fails_to_start_tells_its_last_words(kernel_that):
    found = kernel_that("import no_such_module", 10).run()
    assert "no_such_module" in found.problem and found.seconds == 0


@pytest.mark.drill
def test_a_kernel_that_never_answers_is_ended(kernel_that, monkeypatch):
    monkeypatch.setenv(processes.MARK, "never answers")
    assert "1 seconds" in kernel_that("import time; time.sleep(600)", 1).run().problem
    processes.assert_no_survivors("never answers")


def test_a_taken_port_is_noticed():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        assert jupyter_checks.port_problem(s.getsockname()[1]) == "taken"
    assert jupyter_checks.port_problem(0) == ""


def test_processes_talk_and_a_peer_that_never_comes_is_told(monkeypatch):
    assert system_checks.connection_problem() == ""
    monkeypatch.setattr(system_checks, "TALK", "")
    monkeypatch.setattr(system_checks, "TCP_LIMIT_S", 0.2)
    assert "0.2 s" in system_checks.connection_problem()


def test_a_folder_is_tried_by_writing(tmp_path):
    assert jupyter_checks.folder_problem(tmp_path / "not" / "yet") == "" and list(tmp_path.iterdir()) == []
    assert "are needed" in jupyter_checks.folder_problem(tmp_path, 2**62)
    (tmp_path / "file").touch()
    assert jupyter_checks.folder_problem(tmp_path / "file" / "folder")


def test_the_control_group_limits_processes(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "pids.max").write_text("100\n")
    (group / "pids.current").write_text("90\n")
    assert system_checks._left_by_group(tmp_path) == 10
    (group / "pids.max").write_text("max\n")
    assert system_checks._left_by_group(tmp_path) is None


# -- the command

ARGUMENTS = [
    (["--rounds", "3"], "--rounds does not go with --preflight"),
    (["--require-gpus", "-1"], "at least 0"),
    (["--report", "."], "--report"),
]


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as e:
        room_preflight.parse(["--preflight", *arguments])
    said = capsys.readouterr().err
    assert e.value.code == 2 and words in said and len(said.strip().splitlines()) == 1


def test_a_healthy_machine_gets_a_go_and_its_room_a_report_without_secrets(tmp_path):
    secret, room = "s3cr3t-" + tmp_path.name, tmp_path / "room"
    room.mkdir()
    environment = processes.new_environment(COURSE_ROOM=str(room), COURSE_NAME="Ada", HF_TOKEN=secret, LD_DEBUG="")
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=250, cwd=ROOT, env=environment)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0] == lines[-1] and "GO: ready for the course" in lines[0], done.stdout
    assert done.stderr == ""
    (file,) = room.rglob("*.*")
    said = json.loads(file.read_text())
    assert file.relative_to(room) == Path("Ada/preflight.json") and said["name"] == "Ada"
    assert said["course"] in lines[1] and len(said["course"]) == 12
    assert {c["name"] for c in said["checks"] if c["status"] == "pass"} >= {
        "kernel",
        "connection",
        "all-reduce",
        "data",
    }
    assert said["ranks"]["n"] >= 1 and said["ranks"]["first_launch_s"] > 0 and said["machine"]["cores"] >= 1
    text = file.read_text() + done.stdout
    assert not [word for word in (secret, str(tmp_path), socket.gethostname(), str(ROOT)) if word in text]
    processes.assert_no_survivors(environment[processes.MARK])


@pytest.mark.drill
def test_broken_things_get_a_no_go_that_names_them(tmp_path):
    """A copy without a notebook, with damaged data and a torch that cannot be loaded, while port 8888 is taken."""
    for name in ("labs", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb*"))
    for name in ("README.md", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks/01_timing.ipynb").unlink()
    (tmp_path / "labs/common/data/moby_dick.txt").write_text("Call me Ishmael!")
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: file too short')")
    environment = processes.new_environment(PYTHONPATH=str(tmp_path))
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", jupyter_checks.PORT))
            s.listen()
        except OSError:
            pass  # somebody else's, which will do
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=250, cwd=tmp_path, env=environment)
    said = json.loads((tmp_path / "build/preflight.json").read_text())
    status = {c["name"]: c["status"] for c in said["checks"]}
    assert done.returncode == 1 and said["verdict"] == "NO-GO", done.stdout
    assert {n for n, s in status.items() if s == "fail"} >= {"torch", "notebooks", "data"} and status["port"] == "warn"
    assert "NO-GO" in done.stdout.splitlines()[0] and "file too short" in done.stdout
    assert "missing: 01_timing.ipynb" in done.stdout and "--port 9000" in done.stdout
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
