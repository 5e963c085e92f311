"""The instructor's page: drawn from whatever is in the room, by files alone, and respectful of who predicted what."""

import html
import json
import os
import re
import socket

import pytest

from labs.classroom import __main__ as classroom
from labs.classroom.collect import progress, questions, read_room, readiness
from labs.classroom.room_page import Letters, render
from labs.kit import room as kept
from labs.kit.check import predict

WHAT = "speedup of DDP on two ranks, MLP"
MACHINES = (
    {"cpu": "AMD EPYC", "cores": 2, "gpus": []},
    {"cpu": "Xeon", "cores": 8, "gpus": [{"name": "NVIDIA L4"}] * 4},
)
NAMES = ("Ada", "Blaise", "Chien-Shiung", "Dorothy", "Emmy", "Fritz", "Grace", "Hedy", "Ida", "Joan", "Karen", "Lise")
EARLY, LATE = "2026-11-21T10:00:00+00:00", "2026-11-21T12:00:00+00:00"


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"provenance": MACHINES[0]}, *rows)))


def pair(predicted, value, utc=EARLY):
    numbers = {"predicted": predicted, "value": value, "low": None, "high": None}
    return {"what": WHAT, "unit": "x", **numbers, "kind": "measured", "notebook": "03_dataparallel_vs_ddp", "utc": utc}


def outcome(state, feedback="", utc=EARLY):
    return {"exercise": "03.1", "state": state, "feedback": feedback, "utc": utc}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A room of 12: one who really predicted something, and 11 with the files of other machines."""
    folder = tmp_path / "room"
    folder.mkdir()
    monkeypatch.setenv("COURSE_ROOM", str(folder))
    monkeypatch.setenv("COURSE_NAME", NAMES[0])
    predict(2.0, WHAT, unit="x").reveal(1.7)
    for k, name in enumerate(NAMES):
        own = folder / name
        own.mkdir(exist_ok=True)
        if k:
            write_lines(own / "predictions-1.jsonl", pair(None, 1.0), pair(9.0, 1.0), pair(k / 4, 1 + k / 10, LATE))
        last = outcome("passed", "", LATE) if k < 8 else outcome("not yet", "the shards overlap", LATE)
        write_lines(own / "outcomes-1.jsonl", outcome("not yet", "the shards overlap"), last)
        report = {
            "verdict": "GO" if k != 3 else "NO-GO",
            "reasons": ["memory: 1 GiB"] * (k == 3),
            "course": "aaaaaaaaaaaa" if k != 5 else "bbbbbbbbbbbb",
            "machine": MACHINES[k % 2],
            "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        }
        if k < 10:
            (own / "preflight.json").write_text(json.dumps(report))
    return folder


def test_the_page_is_one_file_that_needs_no_network(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    monkeypatch.setattr("sys.argv", ["classroom", str(folder), "--out", str(tmp_path / "out")])
    assert classroom.main() == 0
    (file,) = (tmp_path / "out").iterdir()
    page = file.read_text()
    sources = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert sources and all(s.startswith("data:image/png") for s in sources) and "://" not in page
    (alt,) = (html.unescape(a) for a in re.findall(r'alt="([^"]*)"', page))
    assert alt.startswith("Speedup of DDP on two ranks, MLP: predicted 1.62 x, result 1.6")
    assert "could not be read" not in page and capsys.readouterr().err == ""


def test_the_latest_run_of_each_learner_counts(folder):
    learners = read_room(folder).learners
    (question,) = questions(learners)
    assert ("Blaise", 0.25, 1.1) in question.answers and ("Ada", 2.0, 1.7) in question.answers
    (shards,) = progress(learners)
    assert shards.states == {"passed": 8, "not yet": 4, "to do": 0} and shards.feedback == [("the shards overlap", 12)]
    first, *rest = readiness(learners)
    assert (first.name, first.notes) == ("Dorothy", ("memory: 1 GiB",)) and first.machine == "4 x NVIDIA L4"
    assert [r.verdict for r in rest].count("not run") == 2
    assert next(r.notes for r in rest if r.name == "Fritz") == ("course bbbbbbbbbbbb, most have aaaaaaaaaaaa",)


def test_names_are_letters_in_an_anonymous_page_and_a_newcomer_changes_none(folder):
    (folder / "Ada" / "notes.txt").write_text("hello")
    letters = Letters()
    page = re.sub(r'src="[^"]*"', "", render(read_room(folder), letters))
    assert not [n for n in NAMES if n in page] and f"{letters.dealt['Ada']}: notes.txt" in page
    before = dict(letters.dealt)
    (folder / "Marie").mkdir()
    render(read_room(folder), letters)
    assert letters.dealt.items() > before.items() and len(set(letters.dealt.values())) == 13


@pytest.mark.drill
def test_watch_draws_what_is_new_survives_a_lost_share_and_ends_on_interrupt(tmp_path, monkeypatch, capsys):
    room, page = tmp_path / "room", tmp_path / "out" / "index.html"
    (room / "Ada").mkdir(parents=True)

    def arrive():
        (room / "Blaise").mkdir()
        write_lines(room / "Blaise" / "outcomes-1.jsonl", outcome("passed"))

    def interrupt():
        raise KeyboardInterrupt

    events = iter((arrive, lambda: room.rename(tmp_path / "lost"), lambda: (tmp_path / "lost").rename(room), interrupt))
    monkeypatch.setattr(classroom.time, "sleep", lambda _: next(events)())
    monkeypatch.setattr("sys.argv", ["classroom", str(room), "--out", str(tmp_path / "out"), "--watch", "1"])
    assert classroom.main() == 130
    err = capsys.readouterr().err
    assert "Blaise" in page.read_text() and "location.reload()" in page.read_text()
    assert "trying again" in err and err.endswith("stopped\n")


MALFORMED = {
    "predictions-2.jsonl": b'{"provenance": {}}\n{"what": "x", "unit": "", "predicted": 1',
    "predictions-3.jsonl": b'{"what": 3}\n',
    "predictions-4.jsonl": json.dumps(pair(float("inf"), 1)).encode(),
    "outcomes-2.jsonl": json.dumps(outcome("won")).encode(),
    "outcomes-3.jsonl": b"\xff\xfe\x00",
    "preflight.json": b'{"verdict": "MAYBE"}',
    "notes.txt": b"hello",
    "<script>alert(1)<": b"",
}


def test_each_malformed_or_foreign_file_is_one_line_and_the_rest_is_drawn(tmp_path):
    (tmp_path / "Ada").mkdir()
    write_lines(tmp_path / "Ada" / "predictions-1.jsonl", pair(2.0, 1.5))
    for name, text in MALFORMED.items():
        (tmp_path / "Ada" / name).write_bytes(text)
    (tmp_path / "Ada" / ".data_parallel-4.jsonl.12-ab").write_text("half")  # being written
    os.mkfifo(tmp_path / "Ada" / "outcomes-9.jsonl")
    (tmp_path / "Ada" / "linked-1.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "Mallory").symlink_to("/etc")
    (tmp_path / "revealed.json").write_text("{")
    room = read_room(tmp_path)
    named = {text.removeprefix("Ada: ").partition(":")[0] for text in room.problems}
    assert named == {*MALFORMED, "outcomes-9.jsonl", "linked-1.jsonl", "Mallory", "revealed.json"}
    assert all("\n" not in text and len(text) < 300 for text in room.problems)
    page = render(room)
    assert len(questions(room.learners)) == 1 and "<script>alert" not in page and "root:" not in page


def test_instructor_reveals_and_hides(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_ROOM", str(tmp_path))

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["classroom", str(tmp_path), *arguments])
        return classroom.main()

    assert command("--reveal", "03.1", "04.*") == 0
    assert kept.revealed("03.1") and kept.revealed("04.3") and not kept.revealed("03.2")
    assert command("--hide", "04.3") == 0
    assert kept.revealed("04.1") and not kept.revealed("04.3")
    capsys.readouterr()
    for arguments, says in [
        (("--reveal", "03.9"), "there is no exercise '03.9'"),
        (("--watch", "-1"), "watch must be"),
        (("--wach", "1"), "did you mean '--watch'"),
        (("--out", str(tmp_path / "page")), "inside the room"),
    ]:
        with pytest.raises(SystemExit) as end:
            command(*arguments)
        error = capsys.readouterr().err
        assert end.value.code == 2 and says in error and error.count("\n") == 1
    (tmp_path / "revealed.json").write_text("{")
    with pytest.raises(SystemExit):
        command("--reveal", "all")
    assert "remove it and reveal again" in capsys.readouterr().err
