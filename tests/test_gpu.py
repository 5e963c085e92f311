"""`make gpu` without a GPU: its command line, resuming, what a kill leaves on disk, and the decisions of its checks."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labs.gpu import checks
from labs.gpu import runner as gpu
from labs.gpu.accept import refusal
from labs.gpu.tasks import TASKS, Place, Task
from labs.kit.launch import run_on_ranks
from labs.kit.record import Record, Records, load
from labs.kit.supervise import watched_folder

ROOT = Path(__file__).parents[1]


def command(*code):
    """A task's command that runs `code`, one line each, with PART as its folder."""
    return lambda place, part: ["labs.kit.as_line", "\n".join([f"PART = {str(part)!r}", *code])]


@pytest.fixture
def python(monkeypatch):
    """Tasks run `python -c CODE` in place of `python -m labs...`."""
    real = gpu.supervise.started

    def started(words, **options):
        assert words[1:3] == ["-m", "labs.kit.as_line"]
        return real([words[0], "-c", words[3]], **options)

    monkeypatch.setattr(gpu.supervise, "started", started)


WRITE = "open(PART + '/a.txt', 'w').write('whole'); open(PART + '/empty.jsonl', 'w')"


def one(task, folder, limit_s=20.0):
    with watched_folder(sockets=True) as root:
        return gpu.run_task("t", task, Place(1), folder, root, limit_s)


def test_a_task_leaves_its_files_and_a_failed_one_its_log_alone(tmp_path, python):
    done = one(Task("?", 1, 9, command(WRITE, "print('the answer')")), tmp_path)
    assert (
        (done.word, done.reason) == ("done", "the answer")
        and (tmp_path / "a.txt").read_text() == "whole"
        and not (tmp_path / "empty.jsonl").exists()
    )
    (tmp_path / "a.txt").unlink()
    failed = one(Task("?", 1, 9, command(WRITE, "raise SystemExit('no such kernel')")), tmp_path)
    assert (failed.word, failed.reason) == ("failed", "exit code 1: no such kernel")
    assert [p.name for p in tmp_path.iterdir()] == ["t.log"]
    slow = one(Task("?", 1, 9, command(WRITE, "import time; time.sleep(60)")), tmp_path, limit_s=1.0)
    assert slow.word == "failed" and slow.reason == "stopped after 1 s" and slow.seconds < 15
    assert one(Task("?", 1, 9, command(WRITE), gpus=2), tmp_path).reason == "needs 2 GPUs; here is one"
    nothing = lambda place, part: [*command("raise SystemExit(1)")(place, part), "--out", part / "t.jsonl"]  # noqa: E731
    assert one(Task("?", 1, 9, nothing, fine=(0, 1)), tmp_path).word == "failed"


def test_a_run_resumes_and_tries_failed_tasks_again(tmp_path, python, monkeypatch, capsys):
    mended = f"os.path.exists({str(tmp_path / 'ok')!r})"
    wanted = {
        "good": Task("?", 1, 9, command(WRITE, "print('fine')")),
        "bad": Task("?", 1, 9, command("import os", f"raise SystemExit(0 if {mended} else 1)")),
        "two": Task("?", 1, 9, command(WRITE), gpus=2),
    }
    monkeypatch.setattr(gpu, "TASKS", wanted)
    config = gpu.Config(minutes=1.0, out=tmp_path)
    assert gpu.run_all(list(wanted), config, Place(1), tmp_path / "x") == 1
    assert "1 done, 1 failed, 1 cannot" in capsys.readouterr().out
    (tmp_path / "ok").touch()
    assert gpu.run_all(list(wanted), config, Place(1), tmp_path / "x") == 0
    said = capsys.readouterr().out
    assert "done before, skipped: good" in said and "2 done, 0 failed, 1 cannot" in said
    kept = json.loads((tmp_path / "x" / "gpu.json").read_text())
    assert [row["task"] for row in kept["tasks"]] == ["good", "bad", "two"] and not kept["rehearsal"]


def test_no_task_begins_when_the_time_is_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LEAST_S", 100.0)
    assert gpu.run_all(["launcher"], gpu.Config(minutes=0.1, out=tmp_path), Place(1), tmp_path / "x") == 0
    assert "time is up; run the command again to resume with launcher" in capsys.readouterr().out


def run(*options, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "labs.gpu", *options]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=250, **kwargs)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 3 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "no GPU for torch here" in done.stderr and "--rehearse" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "traecs"], "did you mean 'traces'?"),
        (["--out", "/proc/1/x"], "cannot write to"),
        (["--minutes", "0"], "minutes must be more than 0"),
        (["--rehearse", "--out", "."], "--rehearse writes into build/gpu/rehearsal alone"),
        (["--lsit"], "did you mean '--list'"),
    ],
)
def test_bad_input_is_one_line(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    out, said = capsys.readouterr()
    assert (ended.value.code, out, said.count("\n")) == (2, "", 1) and words in said, said


def test_the_list_fits_its_budgets():
    assert len(gpu.table().splitlines()) == len(TASKS) + 2
    is_check = [name in checks.CHECKS for name in TASKS]
    assert is_check == sorted(is_check, reverse=True), "checks come first"
    assert sum(t.seconds for name, t in TASKS.items() if name in checks.CHECKS) <= 120
    assert all(t.seconds < t.limit_s for t in TASKS.values())
    for name, task in TASKS.items():
        module = ROOT / task.command(Place(2, rehearsal=True), Path("part"))[0].replace(".", "/")
        assert module.with_suffix(".py").exists() or module.is_dir(), name


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_in_a_rehearsal(name, tmp_path):
    place = Place(2, rehearsal=True)
    with watched_folder(sockets=True) as root:
        outcome = gpu.run_task(name, TASKS[name], place, tmp_path, root, 300.0)
    log = tmp_path / f"{name}.log"
    assert outcome.word == "done", log.read_text()[-2000:] if log.exists() else outcome
    for path in tmp_path.glob("*.jsonl"):
        assert not load(path).provenance["gpus"]


REAL = {"gpus": ["NVIDIA H200"], "cuda": "13.0", "driver": "580.159.04", "torch": "2.13.0+cu130"}


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"gpus": []}, "it names no GPU"),
        ({"cuda": None, "torch": "2.13.0+cpu"}, "torch 2.13.0+cpu is a build without CUDA"),
        ({"driver": None}, "it names no driver"),
        ({}, "flop_s is 1.20e+15 FLOP/s, above the datasheet's 9.90e+14 (dense)"),
    ],
)
def test_a_record_of_a_fake_is_refused(made, why):
    fake = Record("lab", "flop_s", "FLOP/s", (1.2e15,), "measured", {}, {}, {"device": "cuda"}, REAL | made)
    assert refusal(fake) == why


def test_a_refused_record_never_reaches_the_folder(tmp_path, python):
    row = {"lab": "t", "metric": "step_s", "unit": "s", "samples": [1.0], "kind": "measured"}
    lines = [{"provenance": REAL | {"cuda": None}}, row | {"case": {}, "config": {}, "layout": {"device": "cuda"}}]
    write = f"open(PART + '/a.jsonl', 'w').write({chr(10).join(map(json.dumps, lines))!r})"
    found = one(Task("?", 1, 9, command(write)), tmp_path)
    assert found.word == "failed" and "without CUDA" in found.reason and not list(tmp_path.iterdir())


def test_all_that_stands_for_a_gpu_in_records_comes_from_one():
    """What ran on the device "cuda", and everything in a folder of `make gpu`."""
    folders = {report.parent for report in ROOT.glob("records/*/gpu.json")}
    assert not any(json.loads((folder / "gpu.json").read_text())["rehearsal"] for folder in folders)
    of_gpus = [
        (path, record)
        for path in ROOT.glob("records/*/**/*.jsonl")
        for record in load(path)
        if record.kind == "recorded" and (record.layout.get("device") == "cuda" or path.parent in folders)
    ]
    assert of_gpus and not [(path, why) for path, record in of_gpus if (why := refusal(record))]


@pytest.mark.drill
def test_a_kill_leaves_whole_files_and_no_process(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "labs.gpu", "--rehearse", "--only", "faults"]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    below, until = [], time.monotonic() + 60
    while len(below) < 4 and time.monotonic() < until:
        time.sleep(0.1)
        below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []


# -- the decisions of the checks


def rec(metric, value, **case):
    return Record("lab", metric, "1", (value,), "measured", case, {}, {"world_size": 1, "device": "cuda"})


def check(monkeypatch, name, *records):
    monkeypatch.setattr(checks, "run_lab", lambda *_, **__: Records(records))
    try:
        return f"pass: {checks.CHECKS[name](False)}"
    except checks.CheckFailed as error:
        return f"fail: {error}"


def test_wrong_results_fail(monkeypatch):
    monkeypatch.setattr(checks.supervise, "run", lambda *_: subprocess.CompletedProcess([], 0, ""))
    right = rec("matmul_relative_error", 1e-7), rec("all_reduce_error", 0.0)
    assert check(monkeypatch, "launcher", *right).startswith("pass: right results")
    assert "relative error of 5e-01" in check(monkeypatch, "launcher", rec("matmul_relative_error", 0.5), right[1])
    assert "wrong sum" in check(monkeypatch, "launcher", right[0], rec("all_reduce_error", 1.0))
    monkeypatch.setattr(checks, "libcuda_mapped", lambda: True)
    assert "mapped libcuda.so" in check(monkeypatch, "launcher", *right)


def test_an_oracle_that_is_off_fails(monkeypatch):
    case = {"model": "mlp", "batch": 32}
    parts = [rec("peak_bytes", n, category=c, **case) for c, n in (("a", 60), ("b", 40))]
    assert "off by +4.2%" in check(monkeypatch, "memory", *parts, rec("measured_bytes", 96, **case))
    assert check(monkeypatch, "memory", *parts, rec("measured_bytes", 150, **case)).startswith("fail: mlp")
    assert "no step was run" in check(monkeypatch, "memory", *parts)


@pytest.mark.parametrize(("fp16", "bf16", "word"), [(1.0, 1.0, "pass"), (7.0, 1.0, "pass"), (7.0, 7.5, "fail")])
def test_16_bits_must_pay_in_the_largest_common_product(monkeypatch, fp16, bf16, word):
    def product(name, seconds, side):
        return rec("step_s", seconds, part="matmul", side=side, precision=name, casts=False)

    found = [product(n, s, 4096) for n, s in (("fp32", 8.0), ("fp16", fp16), ("bf16", bf16))]
    assert check(monkeypatch, "formats", *found, product("fp32", 1.0, 8192)).startswith(word)
    unable = rec("not_possible", 1.0, precision="bf16", why="no kernel")
    assert "bf16 is not possible" in check(monkeypatch, "formats", *found, unable)


def test_ranks_that_are_left_are_counted():
    """A rank that a launch forgot would be a child of the fork server."""
    assert run_on_ranks(os.getpid, 1) and checks.until(lambda: checks.ranks_left() == 0)
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    try:
        assert checks.ranks_left() == 1
    finally:
        child.kill()
        child.join()


def test_a_machine_has_a_folder():
    assert gpu.machine_folder(["NVIDIA A100-SXM4-80GB"] * 4, "2026-11-29T10:00") == "4x-nvidia-a100-sxm4-80gb-2026-11"
    assert gpu.machine_folder(["NVIDIA H200"], "2026-12-01") == "nvidia-h200-2026-12"
