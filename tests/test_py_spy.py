"""A look from outside with py-spy: shown where it is allowed, one line where it is not, never needed."""

import os
import shutil
import stat

import pytest

from labs.chapters.nb09 import py_spy, stacks
from labs.kit.launch import run_on_ranks

DUMP = """Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    _engine_run_backward (torch/autograd/graph.py:979)
    step (labs/common/profiling/late_training.py:105)
    main (train.py:3)
Thread 9 (idle): "Thread-1"
    wait (threading.py:320)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a program of this text in py-spy's place."""

    def put(text):
        path = tmp_path / "py-spy"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_frames_are_those_of_one_thread():
    assert py_spy.frames(DUMP)[0] == "_engine_run_backward (torch/autograd/graph.py:979)"
    assert len(py_spy.frames(DUMP)) == 3 and py_spy.frames(DUMP, "Thread-1") == ["wait (threading.py:320)"]


def test_without_it_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert py_spy.stack(1) == ("", py_spy.problem()) and "pip install py-spy" in py_spy.problem()
    stacks.tell([None, [([], py_spy.problem())] * 2])
    assert capsys.readouterr().out == f"{py_spy.problem()}\n"


def test_what_it_may_not_see_is_one_line(stand_in, monkeypatch):
    stand_in('echo "Permission Denied: try as root" >&2; echo more >&2; exit 1')
    assert py_spy.stack(7) == ("", "py-spy may not look at process 7: Permission Denied: try as root")
    stand_in("sleep 5")
    monkeypatch.setattr(py_spy, "LOOK_S", 0.2)
    assert "no answer" in py_spy.stack(7)[1]


def test_what_it_prints_is_told_rank_by_rank(stand_in, capsys):
    stand_in(f"cat << 'END'\n{DUMP}END")
    dump, why = py_spy.stack(7)
    assert dump == DUMP and not why
    stacks.tell([None, [(py_spy.frames(dump), "")]])
    assert capsys.readouterr().out.startswith(
        "rank 0: _engine_run_backward (torch/autograd/graph.py:979) < step (labs/"
    )


def test_the_late_rank_looks_at_all_while_they_wait():
    found = run_on_ranks(stacks.look, 2)
    assert found[0] is None and len(found[1]) == 2
    for frames, why in found[1]:
        assert bool(frames) != bool(why)
    if shutil.which("py-spy") and not found[1][0][1]:
        assert any("late_training" in frame for frame in found[1][0][0])
