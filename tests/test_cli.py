"""Bad input is one line that names the fix, and the help is good enough to be the documentation."""

import os
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from typing import Literal

import pytest
from processes import HERE, MARK, PYTHON, assert_no_survivors, leftovers, new_environment

from labs.kit import cli, lab
from labs.kit.errors import BadInput, require
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch


@dataclass(frozen=True)
class Config:
    """Some knobs."""

    batch_size: int = 64
    """Samples per rank."""
    mode: Literal["ddp", "single"] = "ddp"
    """How to train."""
    names: tuple[str, ...] = ("a",)
    """Several words."""
    smoke: bool = False
    """Short."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")


DOC = """What does it answer?

    python -m labs.a_lab                       # code stays as it is
    torchrun --nproc-per-node 2 -m labs.a_lab
"""
LAB = types.SimpleNamespace(__name__="labs.a_lab", __doc__=DOC, Config=Config, run=None)


def parse(*arguments):
    return cli.parse(LAB, "python -m labs.a_lab", list(arguments))


def test_the_command_line_is_the_config():
    command = parse("--batch-size", "8", "--names", "x", "y", "--smoke", "--nproc", "1", "--mode", "single")
    assert command.config == Config(8, "single", ("x", "y"), True)
    assert command.launch == cli.Launch(nproc=1) and command.output.out is None
    assert parse("--batch_size=8").config.batch_size == 8


def test_the_help_documents_everything(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        parse("--help")
    text = capsys.readouterr().out
    assert end.value.code == 0 and "What does it answer?" in text
    assert "    python -m labs.a_lab                       # code stays as it is\n" in text
    for word in ("--batch-size INT", "Samples per rank.", "(default: 64)", "--mode {ddp,single}", "--nproc", "--out"):
        assert word in text, word


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["--batch-size", "many"], "--batch-size: invalid literal for int() with base 10: 'many'"),
        (["--batchsize", "3"], "there is no option --batchsize: did you mean '--batch-size'? --help lists them all"),
        (["--mode", "fsdp"], "invalid choice 'fsdp' for argument '--mode'. Expected one of ('ddp', 'single')"),
        (["--out", "/dev/null/x"], "/dev/null is not a folder: choose another file with --out"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, told, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.startswith(f"python -m labs.a_lab: {told}") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"batchsize": 3},
            "lab 'a_lab' has no parameter 'batchsize': did you mean 'batch_size'? It has batch_size, mode",
        ),
        ({"batch_size": "3"}, "batch_size of lab 'a_lab' must be int, not '3'"),
        ({"names": [1]}, "names of lab 'a_lab' must be tuple[str, ...], not [1]"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
    ],
)
def test_bad_parameters_name_the_fix(values, told):
    with pytest.raises(BadInput) as error:
        make_config(LAB, values)
    assert str(error.value).startswith(told) and "\n" not in str(error.value)
    assert error.value._render_traceback_() == [f"BadInput: {error.value}"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"lab": "data_paralel"}, "no lab 'data_paralel': did you mean 'data_parallel'? The labs are"),
        ({"lab": "no_package.lab"}, "cannot import lab 'no_package.lab': No module named 'no_package'"),
        ({"lab": "os.path"}, "os.path is not a lab: it needs a Config and a run()"),
        ({"nproc": 64}, "64 ranks need 64 devices"),
        ({"nproc": 1, "timeout_s": 0}, "timeout_s must be positive, not 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu"),
    ],
)
def test_launch_refuses_bad_input_before_anything_starts(arguments, told, monkeypatch):
    monkeypatch.delenv("COURSE_OVERSUBSCRIBE", raising=False)
    monkeypatch.setattr("labs.kit.launch.Job", None)
    with pytest.raises(BadInput) as error:
        launch(**{"lab": "labs_for_tests.empty", **arguments})
    assert told in str(error.value) and "\n" not in str(error.value)


def test_the_shell_refuses_bad_input_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("COURSE_OVERSUBSCRIBE", raising=False)
    environment, command = new_environment(TMPDIR=str(tmp_path)), [*PYTHON, "-m", "labs_for_tests.faulty"]
    done = subprocess.run(
        [*command, "--nproc", "64"], env=environment, cwd=HERE, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("python -m labs_for_tests.faulty: 64 ranks need 64 devices")
    assert_no_survivors(environment[MARK])
    assert not leftovers(tmp_path)


SOURCE = """
from dataclasses import dataclass
from {package}edited_shared import FACTOR

@dataclass(frozen=True)
class Config:
    size: int = {default}
    smoke: bool = False

def run(config, rank):
    yield rank.record("size", "1", config.size * FACTOR)
"""


def test_an_edit_takes_effect_at_the_next_launch(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(lab, "_is_lab_code", lambda name: name in ("edited_lab", "edited_shared"))
    shared, file = tmp_path / "edited_shared.py", tmp_path / "edited_lab.py"
    shared.write_text("FACTOR = 1\n")
    file.write_text(SOURCE.format(package="", default=3))
    try:
        assert launch("edited_lab", 1).one("size").value == 3
        time.sleep(0.02)
        file.write_text(SOURCE.format(package="", default=500))
        assert launch("edited_lab", 1).one("size").value == 500
        time.sleep(0.02)
        shared.write_text("FACTOR = 1000\n")
        os.utime(shared, (1e9, 1e9))  # by a file server whose clock is behind
        assert launch("edited_lab", 1).one("size").value == 500_000
        assert lab_module("edited_lab").FACTOR == 1000
    finally:
        sys.modules.pop("edited_lab", None)
        sys.modules.pop("edited_shared", None)


def test_a_reader_that_leaves_early_costs_no_word_and_no_record(tmp_path):
    """As `python -m labs.X --out FILE | head -1` does: the pipe is closed before anything is printed."""
    code = """
from labs.kit import cli, record
lab = type("lab", (), {"answer": staticmethod(lambda records: ["a sentence " * 20] * 2000)})
made = record.Records([record.Record("lab", "metric", "s", (1.0, 2.0))])
code = cli.report(lab, made, None, cli.Output(out=cli.Path("kept.jsonl"), table=True))
print("after it")
raise SystemExit(code)
"""
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, timeout=250, env=environment
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "kept.jsonl").is_file()
