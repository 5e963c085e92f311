"""Records: what is saved is what is loaded, whole or not at all, and errors name file, line and field."""

import json
import os
import signal
import subprocess
import time

import numpy
import pytest
import torch
from processes import PYTHON, wait_for

from labs.kit import record
from labs.kit.rank import Rank
from labs.kit.record import Record, Records, load, write_atomic


def make(metric="step_s", samples=(1.0, 2.0, 4.0), **case):
    layout = {"world_size": 2, "rank": None, "backend": "gloo", "device": "cpu"}
    return Record("a_lab", metric, "s", samples, "measured", case, {"batch_size": 64}, layout, {"cpu": "a cpu"})


def test_saved_records_come_back_as_recorded(tmp_path):
    run = Records([make(mode="ddp", sizes=(1, 2)), make("loss", mode="single")])
    path = run.save(tmp_path / "new folder" / "run.jsonl")
    loaded = load(path)
    assert [r.kind for r in loaded] == ["recorded", "recorded"]
    assert [(r.metric, r.samples, r.case, r.config, r.layout, r.provenance) for r in loaded] == [
        (r.metric, r.samples, r.case, r.config, r.layout, r.provenance) for r in run
    ]
    assert path.read_text().count("provenance") == 1, "one header for all that was measured in one run"
    assert oct(path.stat().st_mode & 0o777) == oct(0o666 & ~_umask())
    loaded.save(path)
    assert list(load(path)) == list(loaded)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_runs_of_two_machines_keep_their_provenance(tmp_path):
    theirs = Record("a_lab", "step_s", "s", (1.0,), provenance={"cpu": "another"})
    both = load((Records([make()]) + Records([theirs, make()])).save(tmp_path / "run.jsonl"))
    assert [r.provenance["cpu"] for r in both] == ["a cpu", "another", "a cpu"]


def test_provenance_says_where_and_when():
    here = record.provenance()
    assert {"utc", "cpu", "cores", "memory_bytes", "gpus", "driver", "torch", "cuda", "python", "commit"} <= here.keys()
    assert here["torch"] == torch.__version__ and here["utc"].endswith("+00:00")
    json.dumps(here, allow_nan=False)


def test_choosing_records():
    run = Records([make(mode="ddp", ranks=1), make(mode="ddp", ranks=2), make("loss")])
    assert len(run.where("step_s", mode="ddp")) == 2 and len(run[:2]) == 2 and len(run.where(ranks=2)) == 1
    assert run.one("step_s", ranks=2).value == 2.0
    with pytest.raises(LookupError, match=r"2 records of 'step_s' with \{'mode': 'ddp'\}.*'ranks': 1"):
        run.one("step_s", mode="ddp")
    with pytest.raises(LookupError, match=r"metrics here: \['loss', 'step_s'\]"):
        run.one("nothing")
    assert list(run.frame.columns) == ["lab", "metric", "mode", "ranks", "value", "unit", "n", "kind"]
    assert repr(run) == "<3 records: loss, step_s>" and "step_s" in run._repr_html_()
    assert Records().frame.empty and Records().provenance == {}


@pytest.mark.parametrize("samples", [3, numpy.float32(3), torch.tensor([3])])
def test_samples_may_be_one_number_or_many_of_any_library(samples):
    rank = Rank(0, 1, 0, 1, torch.device("cpu"), "gloo", (), lab="a_lab")
    made = rank.record("step_s", "s", samples, size=numpy.int64(4))
    assert made.samples == (3.0,) and json.dumps(made.case) == '{"size": 4}'
    assert made.layout == {"world_size": 1, "rank": None, "backend": "gloo", "device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": []}, "no samples"),
        ({"samples": [1.0, float("nan")]}, "not finite"),
        ({"kind": "guessed"}, "kind must be one of measured, recorded"),
        ({"case": {"unit": 1}}, "name of a column"),
    ],
)
def test_a_record_that_could_not_be_read_again_cannot_be_made(changes, told):
    values = {"lab": "a_lab", "metric": "step_s", "unit": "s", "samples": [1.0]}
    with pytest.raises(ValueError, match=f"'step_s' of lab 'a_lab'.*{told}"):
        Record(**{**values, **changes})


GOOD = {
    "lab": "a",
    "metric": "m",
    "unit": "s",
    "samples": [1.0],
    "kind": "measured",
    "case": {},
    "config": {},
    "layout": {},
}
HEADER = '{"provenance": {}}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no records"),
        (json.dumps(GOOD), "line 1, field 'provenance': missing"),
        (HEADER + json.dumps(GOOD)[:-9], "line 2: not JSON"),
        (HEADER + "[" * 100_000, "line 2: not JSON"),
        (HEADER + json.dumps({k: v for k, v in GOOD.items() if k != "unit"}), "line 2, field 'unit': missing"),
        (HEADER + json.dumps(GOOD | {"metric": 3}), "line 2, field 'metric': str needed, not 3"),
        (HEADER + json.dumps(GOOD | {"case": {"value": 1}}), "line 2.*case 'value'"),
        (HEADER + json.dumps(GOOD | {"samples": []}), "line 2.*no samples"),
        (HEADER + json.dumps(GOOD | {"samples": [float("nan")]}), "line 2.*sample is not finite: nan"),
        (HEADER + json.dumps(GOOD | {"kind": "guess"}), "line 2.*kind must be one of measured"),
        (HEADER + json.dumps(GOOD | {"extra": 1}), "line 2, field 'extra': unknown"),
        (HEADER + json.dumps(GOOD) + "\n{}", "line 3, field 'lab': missing"),
    ],
)
def test_a_malformed_file_names_file_line_and_field(text, told, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"run.jsonl.*{told}"):
        load(path)


def test_a_file_that_is_no_text_or_not_there(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(HEADER.encode() + b"\xff\xfe")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        load(tmp_path / "run.jsonl")
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        load(tmp_path / "nothing.jsonl")


@pytest.mark.drill
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "run.jsonl", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_pipe_are_written_through(tmp_path):
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to("real.jsonl")
    write_atomic(tmp_path / "link.jsonl", "new")
    assert (tmp_path / "link.jsonl").is_symlink() and (tmp_path / "real.jsonl").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        write_atomic(tmp_path / "pipe", "through")
        assert reader.stdout.read() == "through"


@pytest.mark.drill
def test_killed_while_saving_the_file_is_old_or_new(tmp_path):
    path = tmp_path / "run.jsonl"
    code = (
        "import sys\nfrom labs.kit.record import Record, Records\n"
        "run = Records(Record('a', f'm{i}', 's', [1.0] * 400) for i in range(50))\n"
        f"while True: run.save({str(path)!r})"
    )
    for delay_s in (0.01, 0.03, 0.05, 0.08):
        path.unlink(missing_ok=True)
        with subprocess.Popen([*PYTHON, "-c", code]) as process:
            wait_for(path.exists)
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
        assert len(load(path)) == 50
