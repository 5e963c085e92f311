"""The instructor's page: drawn from whatever is in the room, by files alone, and respectful of who predicted what."""

import contextlib
import dataclasses
import html
import json
import os
import re
import socket

import pytest

from labs.classroom import __main__ as classroom
from labs.classroom.room.collect import read_room
from labs.classroom.room.page import Seats, anonymous, render, seat
from labs.classroom.room.questions import questions
from labs.kit import room as kept
from labs.kit.check import predict
from labs.kit.launch import launch
from labs.kit.record import Record, Records

WHAT = "speedup of DDP on two ranks, MLP"
MACHINES = ({"cpu": "AMD EPYC", "cores": 2, "gpus": []}, {"cpu": "Xeon", "cores": 8, "gpus": ["NVIDIA L4"] * 4})
NAMES = ("Ada", "Blaise", "Chien-Shiung", "Dorothy", "Emmy", "Fritz", "Grace", "Hedy", "Ida", "Joan", "Karen", "Lise")


def ddp_records(speed_up, machine, **config):
    """What launch("data_parallel", model="cnn") gives on a machine where DDP is so much faster."""
    common = {
        "config": {"model": "cnn", "split": "weak", **config},
        "provenance": {**machine, "utc": "2026-11-21"},
        "layout": {"world_size": 2, "rank": None, "device": "cuda" if machine["gpus"] else "cpu"},
    }
    steps = [
        Record(
            "data_parallel",
            "step_s",
            "s",
            tuple(0.01 * 2 * n / g * k for k in (1, 1.1, 0.9)),
            case={"mode": mode, "ranks": n, "batch_per_rank": 128},
            **common,
        )
        for mode, n, g in (("single", 1, 2.0), ("ddp", 2, 2 * speed_up))
    ]
    return Records([*steps, Record("data_parallel", "all_reduces_per_step", "1", (1,), **common)])


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in ({"provenance": MACHINES[0]}, *rows)))


def pair(predicted, value, utc="2026-11-21T10:00:00+00:00", what=WHAT):
    return {
        "what": what,
        "unit": "x",
        "predicted": predicted,
        "value": value,
        "low": None,
        "high": None,
        "kind": "measured",
        "notebook": None,
        "utc": utc,
    }


def outcome(exercise, state, feedback="", utc="2026-11-21T10:00:00+00:00"):
    return {"exercise": exercise, "state": state, "feedback": feedback, "utc": utc}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A room of 12: one who really ran something, and 11 with the files of other machines."""
    folder = tmp_path_factory.mktemp("room")
    with pytest.MonkeyPatch.context() as here:
        here.setenv("COURSE_ROOM", str(folder))
        here.setenv("COURSE_NAME", NAMES[0])
        launch("labs_for_tests.empty", 1)
        predict(2.0, WHAT, unit="x").against(1.7)
    for k, name in enumerate(NAMES):
        own, machine = folder / name, MACHINES[k % 2]
        own.mkdir(exist_ok=True)
        ddp_records(1.5 + k % 2, machine).save(own / "data_parallel-1.jsonl")
        if k:
            late = "2026-11-21T11:00:00+00:00"
            write_lines(own / "predictions-1.jsonl", pair(9.0, 1.0), pair(k / 4, 1 + k / 10, late))
        write_lines(
            own / "outcomes-1.jsonl",
            outcome("03.1", "not yet", "the shards overlap"),
            outcome(
                "03.1",
                "passed" if k < 8 else "not yet",
                "" if k < 8 else "the shards overlap",
                "2026-11-21T12:00:00+00:00",
            ),
        )
        report = {
            "schema": 1,
            "verdict": "GO" if k != 3 else "NO-GO",
            "reasons": ["shared memory: 64 MB"] * (k == 3),
            "warnings": 0,
            "course": "aaaaaaaaaaaa" if k != 5 else "bbbbbbbbbbbb",
            "machine": machine,
            "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
            "utc": "2026-11-21T09:00:00",
        }
        if k < 10:
            (own / "preflight.json").write_text(json.dumps(report))
    return folder


# -- the whole page


def test_page_is_one_file_that_needs_no_network(folder, tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("sys.argv", ["classroom", str(folder), "--out", str(tmp_path)])
    assert classroom.main() == 0
    assert [p.name for p in tmp_path.iterdir()] == ["index.html"]
    page = (tmp_path / "index.html").read_text()
    sources = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert sources and all(s.startswith(("data:image/png", "#")) for s in sources) and "://" not in page
    alts = [html.unescape(a) for a in re.findall(r'alt="([^"]*)"', page)]
    assert any(a.startswith("Speedup of DDP on two ranks, MLP: predicted 1.62 x, measured 1.6") for a in alts), alts
    assert "Files that could not be read" not in page and capsys.readouterr().err == ""
    assert "03_dataparallel_vs_ddp" in page and "12 of 12 predicted, 12 measured" in page.replace("\n", " ")


def test_names_are_letters_in_an_anonymous_page_everywhere(folder):
    room = read_room(folder)
    room.problems.append(("Ada", "x.jsonl: not JSON"))
    seats = Seats()
    page = re.sub(r'src="[^"]*"', "", render(anonymous(room, seats), hide_names=True))
    assert not [n for n in NAMES if n in page] and "seat A" in page and f"{seats.letters['Ada']}: x.jsonl" in page
    before = dict(seats.letters)
    room.learners.append(dataclasses.replace(room.learners[0], name="Marie"))
    anonymous(room, seats)
    assert seats.letters == {**before, "Marie": "seat M"}, "a newcomer changes nobody's letter"
    assert [seat(k) for k in (0, 25, 26, 27, 701, 702)] == [f"seat {x}" for x in ("A", "Z", "AA", "AB", "ZZ", "AAA")]


@pytest.mark.drill
def test_watch_draws_what_is_new_survives_a_lost_share_and_ends_on_interrupt(tmp_path, monkeypatch, capsys):
    room, page = tmp_path / "room", tmp_path / "out" / "index.html"
    (room / "Ada").mkdir(parents=True)

    def arrive():
        (room / "Blaise").mkdir()
        write_lines(room / "Blaise" / "outcomes-1.jsonl", outcome("03.1", "passed"))

    def interrupt():
        raise KeyboardInterrupt

    events = iter((arrive, lambda: room.rename(tmp_path / "lost"), lambda: (tmp_path / "lost").rename(room), interrupt))
    monkeypatch.setattr(classroom.time, "sleep", lambda _: next(events)())
    monkeypatch.setattr("sys.argv", ["classroom", str(room), "--out", str(tmp_path / "out"), "--watch", "1"])
    assert classroom.main() == 130
    out, err = capsys.readouterr()
    assert "Blaise" in page.read_text() and "location.reload()" in page.read_text()
    assert out.count("index.html") == 2, "drawn when Blaise came, not when nothing had changed"
    assert "is not a folder" in err and err.endswith("stopped\n")


# -- files of others


MALFORMED = {
    "predictions-2.jsonl": b'{"provenance": {}}\n{"what": "x", "unit": "", "predicted": 1',
    "predictions-3.jsonl": b'{"what": 3}\n[]\nnull\n{"provenance": 4}\n',
    "predictions-4.jsonl": json.dumps(pair(10**400, 1)).encode() + b"\n" + json.dumps(pair(None, None)).encode(),
    "predictions-5.jsonl": b'{"what": "w", "unit": "", "predicted": NaN, "value": 1, "low": 1, "high": 1, '
    b'"kind": "measured", "utc": ""}',
    "outcomes-2.jsonl": json.dumps(outcome("03.1", "won")).encode(),
    "outcomes-3.jsonl": b"\xff\xfe\x00",
    "data_parallel-2.jsonl": b'{"provenance": {}}\n{"lab": "x"',
    "data_parallel-3.jsonl": b"",
    "nested-1.jsonl": b"[" * 100_000,
    "preflight.json": b'{"verdict": "MAYBE"}',
    "notes.txt": b"hello",
    "<script>alert(1)<": b"",
}


@pytest.mark.drill
def test_each_malformed_or_foreign_file_is_one_line_and_the_rest_goes_on(tmp_path):
    (tmp_path / "Ada").mkdir()
    write_lines(tmp_path / "Ada" / "predictions-1.jsonl", pair(2.0, 1.5))
    for name, text in MALFORMED.items():
        (tmp_path / "Ada" / name).write_bytes(text)
    (tmp_path / "Ada" / ".data_parallel-4.jsonl.12-ab").write_text("half")  # being written
    (tmp_path / "Ada" / "folder").mkdir()
    os.mkfifo(tmp_path / "Ada" / "outcomes-9.jsonl")
    (tmp_path / "Ada" / "linked-1.jsonl").symlink_to("/etc/passwd")
    (tmp_path / "Mallory").symlink_to("/etc")
    (tmp_path / "index.html").write_text("")
    (tmp_path / "revealed.json").write_text("{")
    room = read_room(tmp_path)
    named = [text.partition(",")[0].partition(":")[0] for _, text in room.problems]
    others = {"folder", "outcomes-9.jsonl", "linked-1.jsonl", "Mallory", "index.html", "revealed.json"}
    assert set(named) == set(MALFORMED) | others
    assert all("\n" not in text and len(text) < 300 and str(tmp_path) not in text for _, text in room.problems)
    page = render(room)
    assert len(questions(room.learners)) == 1 and "<script>" not in page and "root:" not in page


# -- what is computed


# -- figures


# -- solutions


def test_instructor_reveals_and_hides(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_ROOM", str(tmp_path))

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["classroom", str(tmp_path), *arguments])
        return classroom.main()

    assert command("--reveal", "03.1", "04.*") == 0
    assert kept.revealed("03.1") and kept.revealed("04.3") and not kept.revealed("03.2")
    assert command("--hide", "04.3") == 0
    assert kept.revealed("04.1") and not kept.revealed("04.3")
    assert command("--reveal", "all") == 0 and kept.revealed("00.1")
    assert command("--hide", "all") == 0 and not kept.revealed("00.1")
    capsys.readouterr()
    for arguments, says in [
        (("--reveal", "03.9"), "there is no exercise '03.9'"),
        (("--watch", "-1"), "watch must be"),
        (("--wach", "1"), "did you mean '--watch'"),
        (("--out", str(tmp_path / "page")), "inside of the room"),
    ]:
        with pytest.raises(SystemExit) as end:
            command(*arguments)
        error = capsys.readouterr().err
        assert end.value.code == 2 and says in error and error.count("\n") == 1
    (tmp_path / "revealed.json").write_text("{")
    with pytest.raises(SystemExit), contextlib.suppress(UnicodeError):
        command("--reveal", "all")
    assert "remove it and reveal again" in capsys.readouterr().err
