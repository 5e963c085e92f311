"""All claims on trial: kept evidence, what decides a verdict, running it again, votes, the command."""

import json
import re
import sys
from pathlib import Path

import pytest

from labs.chapters.nb11 import vote
from labs.claims import __main__ as command
from labs.kit import docket, evidence
from labs.kit.claims import SIGNS, Verdict, claims, deciding, judge, table
from labs.kit.errors import BadInput
from labs.kit.record import Record, Records, load

ROOT = Path(__file__).parents[1]


def record(metric="step_s", lab="ddp_facts", ranks=2, utc="2026-01-01T00:00:00+00:00", **config):
    return Record(lab, metric, "s", (1.0, 2.0), config=config, layout={"world_size": ranks}, provenance={"utc": utc})


def test_every_claim_has_a_verdict_and_what_would_change_it():
    for claim, found in docket.recorded().rows:
        assert found.word != "not tried yet", f"{claim.id}: {found.because}"
        assert claim.changes, f"{claim.id} does not say what would change its verdict"
        if docket.kind_of(found) == docket.NEEDS:
            assert claim.command.startswith(("python ", "make ", "torchrun ")), claim.id


@pytest.mark.parametrize(
    ("notebook", "computed"),
    [
        ("01", {"C07", "C08", "C10", "C15", "C22", "E23"}),
        ("02", {"A33", "D23", "E06"}),
        ("03", {"A13", "A20", "A21", "B37", "B46", "C27"}),
        ("04", {"A30", "B09", "B10", "E16", "E18", "E19", "E20"}),
        ("05", {"A27", "B12", "B14"}),
        ("06", {"D18"}),
        ("07", {"A19", "B06", "B18", "C14", "C23"}),
    ],
)
def test_every_computed_claim_is_decided_by_the_committed_run(notebook, computed):
    run, found = evidence.kept(notebook, evidence.RECORDED), [c for c in claims(notebook) if not c.verdict]
    assert {c.id for c in found} == computed
    for claim in found:
        assert judge(claim, run, gpus=0, strict=True).word in ("holds", "does not hold", "depends"), claim.id
        assert judge(claim, Records(), gpus=0, strict=True).word == "not tried yet"


def test_the_docket_says_what_the_committed_notebooks_say():
    """Verdicts recorded with a notebook's outputs are those that its own table shows."""
    trial = docket.recorded()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        number = path.name[:2]
        rows = [row for row in trial.rows if row[0].notebook == number]
        if number == "11" or all(claim.verdict for claim, _ in rows):
            continue
        outputs = [o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", [])]
        texts = ["".join(o.get("data", {}).get("text/plain", "")) for o in outputs]
        for summary in (t for t in texts if re.match(r"\d+ claims?: ", t)):  # some notebooks name five claims in prose
            assert summary == docket.Docket(tuple(rows))._summary(), path.name


def test_evidence_is_kept_in_a_kernel_alone_and_never_of_a_smoke_run(tmp_path, monkeypatch):
    monkeypatch.setenv(evidence.FOLDER, str(tmp_path))
    monkeypatch.delenv("COURSE_SMOKE", raising=False)
    shell = type("IPython", (), {"get_ipython": staticmethod(lambda: object())})
    monkeypatch.setitem(sys.modules, "IPython", type("IPython", (), {"get_ipython": staticmethod(lambda: None)}))
    evidence.keep("03", Records([record()]))
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    evidence.keep("03", Records([record(smoke=True)]))
    monkeypatch.setenv("COURSE_SMOKE", "1")
    evidence.keep("03", Records([record()]))
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("COURSE_SMOKE")
    table("03", Records([record()]))
    assert [r.metric for r in evidence.kept("03")] == ["step_s"]
    (tmp_path / "file").touch()
    monkeypatch.setenv(evidence.FOLDER, str(tmp_path / "file"))  # no folder: the notebook goes on
    evidence.keep("03", Records([record()]))


def test_what_decides_is_found_by_leaving_out(monkeypatch):
    claim = next(c for c in claims("03") if not c.verdict)

    def needs_both(records):
        slow, fast = records.one("step_s", way="slow"), records.one("step_s", way="fast")
        return Verdict("holds", f"{slow.value} {fast.value}")

    monkeypatch.setattr("labs.kit.claims.judge_of", lambda c: needs_both)

    def run(way, metric="step_s"):
        return Record("ddp_facts", metric, "s", (1.0,), case={"way": way}, config={"steps": len(way + metric)})

    given = Records([run("slow"), run("other", "loss"), run("fast"), run("slow", "bytes_moved")])
    assert [[r.case["way"] for r in launch] for launch in deciding(claim, given)] == [["slow", "fast"]]


def test_a_launch_is_called_again_as_it_was():
    configured = record(lab="amp_training", rows=[8, 32], smoke=False, ranks=4)
    call = evidence.call_of(Records([configured]))
    assert call.parameters == {"rows": (8, 32)} and call.nproc == 4
    assert str(call) == 'launch("amp_training", nproc=4, rows=(8, 32))'
    with pytest.raises(BadInput, match="no_such_lab"):
        evidence.call_of(Records([record(lab="no_such_lab")]))


def test_all_recorded_launches_can_be_called_again():
    """Their labs and parameters are still there: nothing is started."""
    from labs.kit.lab import lab_module, make_config

    for number in sorted({c.notebook for c in claims()}):
        for run in evidence.launches(docket.recorded_evidence(number)):
            if docket.is_lab(run) and "cell:" not in str(run[0].config):
                call = evidence.call_of(run)
                make_config(lab_module(call.lab), call.parameters)


def test_again_judges_by_new_records(monkeypatch):
    calls = []

    def launched(lab, nproc, **options):
        calls.append((lab, nproc))
        return Records([r for r in docket.recorded_evidence(docket.by_id("E19").notebook) if r.lab == lab])

    monkeypatch.setattr(docket, "launch", launched)
    found = docket.again("E19")
    assert calls == [(c.lab, c.nproc) for c in docket.sheet("E19").calls] and calls
    assert found.verdict.word == docket.sheet("E19").verdict.word
    assert found.others[0][0] == "recorded"


def test_votes_are_scored_as_by_hand():
    assert vote.brier([(100, True), (0, False)]) == 0
    assert vote.brier([(50, True), (50, False)]) == vote.EVERYTHING_50
    assert vote.brier([(80, True), (80, False)]) == pytest.approx((0.04 + 0.64) / 2)
    trial = docket.recorded()
    held = next(c.id for c, v in trial.rows if v.word == "holds")
    failed = next(c.id for c, v in trial.rows if v.word == "does not hold")
    votes = vote.cast({held: 90, failed: 20})
    assert votes.brier(trial) == pytest.approx((0.01 + 0.04) / 2)
    lines = vote.calibration(votes, trial)
    assert lines[0].startswith("of 1 that you gave 0 to 33 %, 0 held") and "67 to 100 %, 1 held" in lines[1]


def test_votes_that_cannot_be_are_told_by_name():
    for wrong, said in (({"Z99": 50}, "Z99"), ({"A13": 120}, "A13.*120"), ({"A13": None}, "A13"), ({}, "votes are")):
        with pytest.raises(BadInput, match=said):
            vote.cast(wrong)


def test_the_same_lot_for_everybody_and_no_claim_that_needs_a_gpu():
    assert vote.drawn(1) == vote.drawn(1) != vote.drawn(2)
    assert all(c.gpus == 0 for c in vote.drawn(3, 40))
    assert all(docket.recorded().verdict(c.id).word in (*SIGNS, "not tested") for c in vote.drawn(1))


def test_the_command_tells_one_and_filters_many(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["labs.claims", *args])
        try:
            return command.main(), *capsys.readouterr()
        except SystemExit as e:
            return e.code, *capsys.readouterr()

    code, out, _ = run("C16")
    assert code == 0 and "decided by" in out and "would change it" in out
    code, out, _ = run("--article", "C", "--verdict", "does not hold")
    assert code == 0 and "DOES NOT HOLD" in out and "Docket(" not in out
    code, out, _ = run("--article", "C", "--verdict", "does not hold", "--json")
    assert code == 0 and {row["verdict"] for row in json.loads(out)} == {"does not hold"}
    for args, said in ((["C99"], "C99"), (["--again"], "needs a claim"), (["--subject", "memroy"], "memory")):
        code, out, err = run(*args)
        assert code == 2 and said in err and out == ""


def test_recorded_files_are_whole():
    for path in evidence.RECORDED.glob("*.jsonl"):
        assert all(r.kind != "measured" for r in load(path))
