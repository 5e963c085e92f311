"""What a learner's session keeps in a room, and that no room, however broken, costs a cell."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from labs.kit import record, room
from labs.kit.check import TODO, check, predict, show_solution
from labs.kit.launch import launch
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records

RUN = Records([Record("lab", "step_s", "s", (1.0, 2.0), provenance={"cpu": "x"})])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A room that this test's learner, Ada L., has opted into."""
    monkeypatch.setenv("COURSE_ROOM", str(tmp_path / "room"))
    monkeypatch.setenv("COURSE_NAME", "Ada L.")
    (tmp_path / "room").mkdir()
    return tmp_path / "room"


def rows(folder, topic):
    """All lines of a topic but the header lines."""
    lines = [json.loads(x) for p in sorted(folder.glob(f"*/{topic}-*.jsonl")) for x in p.read_text().splitlines()]
    return [x for x in lines if "provenance" not in x]


def test_without_a_room_nothing_is_written_or_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("COURSE_ROOM", raising=False)
    monkeypatch.setattr(room, "write_atomic", lambda *_: pytest.fail("something was written"))
    threads = threading.active_count()
    assert room.own_folder() is None
    predict(2.0, "speed-up", unit="x").reveal(1.0)
    check("03.1", TODO)
    room.keep_records(RUN)
    assert room.revealed("03.1")
    out, err = capsys.readouterr()
    assert err == "" and "03.1 to do" in out and threading.active_count() == threads


def test_a_session_keeps_records_pairs_and_outcomes_and_says_so_once(folder, capsys):
    run = launch("labs_for_tests.empty", 1)
    guess = predict(1.8, "speed-up of DDP", unit="x")
    guess.reveal(Estimate(1.5, 1.4, 1.6, 9, "x"))
    predict(None, "speed-up of DDP", unit="x").reveal(1.2, "modelled")
    check("03.1", lambda: 1)
    check("03.1", None, solutions=True)  # papermill's run of the references is nobody's outcome
    own = folder / "Ada_L"
    (kept,) = own.glob("labs_for_tests.empty-*.jsonl")
    assert list(record.load(kept)) == [Record(**{**vars(r), "kind": "recorded"}) for r in run]
    found = [(r["predicted"], r["value"], r["low"], r["kind"]) for r in rows(folder, "predictions")]
    assert found == [(1.8, None, None, "measured"), (1.8, 1.5, 1.4, "measured"), (None, 1.2, 1.2, "modelled")]
    (outcome,) = rows(folder, "outcomes")
    assert (outcome["exercise"], outcome["state"]) == ("03.1", "not yet")
    assert outcome["feedback"].startswith("<lambda> must take the arguments") and "\n" not in outcome["feedback"]
    assert room.own_folder() == own
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and str(own) in said[0] and "Nothing is sent" in said[0] and "%env COURSE_ROOM=" in said[0]


def test_two_kernels_of_one_learner_write_at_once(folder):
    code = "from labs.kit.check import predict\nfor i in range(20): predict(float(i), f'question {i}')"
    kernels = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    try:
        assert [k.communicate(timeout=250) and k.returncode for k in kernels] == [0, 0]
    finally:
        for k in kernels:
            k.kill()
    found = [r["predicted"] for r in rows(folder, "predictions")]
    assert sorted(found) == sorted([*range(20)] * 2)
    assert [p for p in (folder / "Ada_L").iterdir() if p.name.startswith(".")] == []


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.drill
@pytest.mark.parametrize(
    "fault, says",
    [
        ("missing", "is the share mounted"),
        ("relative", "not an absolute path"),
        ("full", "No space left"),
        ("file in the way", "File exists"),
    ],
)
def test_a_room_that_fails_is_one_line_and_no_failed_cell(folder, fault, says, monkeypatch, capsys):
    if fault == "missing":
        folder.rmdir()
    elif fault == "relative":
        monkeypatch.setenv("COURSE_ROOM", "room")
    elif fault == "full":
        monkeypatch.setattr(room, "write_atomic", full)
    else:
        (folder / "Ada_L").write_text("")
    for _ in range(3):
        predict(1.0, "something").reveal(2.0)
        room.keep_records(RUN)
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert fault != "missing" or not folder.exists(), "the share's mount point was written to"


@pytest.mark.drill
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_room_is_one_line(folder, capsys):
    folder.chmod(0o555)
    try:
        predict(1.0, "something").reveal(2.0)
    finally:
        folder.chmod(0o755)
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.drill
def test_what_a_full_room_refused_follows_when_there_is_space(folder, monkeypatch):
    monkeypatch.setattr(room, "write_atomic", full)
    room.keep_records(RUN)
    monkeypatch.setattr(room, "write_atomic", record.write_atomic)
    room.keep_records(RUN)
    assert len(list(folder.glob("Ada_L/lab-*.jsonl"))) == 2


@pytest.mark.drill
def test_a_share_that_hangs_costs_a_session_half_a_second(folder, monkeypatch, capsys):
    answers = threading.Event()
    monkeypatch.setattr(room, "write_atomic", lambda *a: answers.wait(30) and record.write_atomic(*a))
    started, threads = time.monotonic(), threading.active_count()
    for k in range(20):
        predict(float(k), "something")
    waited = time.monotonic() - started
    threads = threading.active_count() - threads
    answers.set()
    room._session().flush()
    assert waited < 3 * room.WAIT_S and threads == 1
    assert [r["predicted"] for r in rows(folder, "predictions")] == [*range(20)], "something was lost"
    assert [x for x in capsys.readouterr().err.splitlines() if "does not answer" in x] != []


def test_a_solution_is_shown_when_the_instructor_has_revealed_it(folder, capsys):
    show_solution("03.1")
    assert capsys.readouterr().out.startswith("03.1: not revealed yet by your instructor")
    for patterns in (["03.1"], ["03.*"], ["all"]):
        (folder / "revealed.json").write_text(json.dumps({"revealed": patterns}))
        show_solution("03.1")
        assert "def shard(" in capsys.readouterr().out
    for damaged in ("", "[]", '{"revealed": "03.1"}', '{"revealed": [3]}', '{"revealed": ["04.*"]}'):
        (folder / "revealed.json").write_text(damaged)
        assert not room.revealed("03.1")
