"""The claims registry: complete, self-contained, honest about what was not tried."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labs import chapters
from labs.claims import main
from labs.kit import claims as claims_module
from labs.kit import docket
from labs.kit.claims import PAPER, WORDS, Table, Verdict, claims, depends, judge, judged, only_on, table, verdict
from labs.kit.record import Record, Records

NOTEBOOKS = sorted(p.parent.name[2:] for p in Path(chapters.__file__).parent.glob("nb??/claims.py"))
SOME = Records([Record("data_parallel", "step_s", "s", (0.02, 0.03), case={"ranks": 1})])


@pytest.fixture(autouse=True)
def own_judges(monkeypatch):
    """What a test registers is gone after it; what a notebook's module registers, once, on import, is not."""
    for claim in claims():
        claims_module.judge_of(claim)
    # E23 and D13 are the claims that these tests judge themselves
    others = {c: j for c, j in claims_module._judges.items() if c not in ("E23", "D13")}
    monkeypatch.setattr(claims_module, "_judges", others)
    forget_verdicts()
    yield
    forget_verdicts()  # the next module is told what all judges say


def forget_verdicts():
    """`docket` keeps them for each process."""
    docket.recorded.cache_clear()
    docket.recorded_case.cache_clear()


def test_all_167_claims_are_there_and_complete():
    rows = claims()
    assert len(rows) == 167
    assert {c.id[0] for c in rows} == set(claims_module.articles()) == set("ABCDE")
    for c in rows:
        assert c.paper in PAPER and c.gpus in (0, 1, 2) and re.fullmatch(r"\d\d", c.notebook), c.id
        assert re.fullmatch(r"\d+(-\d+)?(, \d+(-\d+)?)*", c.lines), c.id
        for text in (c.claim, c.takeaway):
            assert len(text) > 15 and re.search(r'[.][")]*$', text), f"{c.id}: a whole sentence, not {text!r}"
    counts = {word: sum(c.paper == word for c in rows) for word in PAPER}
    assert counts == {"true": 39, "true with conditions": 59, "outdated": 12, "wrong": 57}


def test_a_reason_says_on_what_it_was_measured():
    here = Record("x", "step_s", "s", (1.0,), layout={"device": "cpu"}, provenance={"cpu": "EPYC", "gpus": ["H200"]})
    there = Record("x", "step_s", "s", (1.0,), layout={"device": "cuda"}, provenance={"cpu": "EPYC", "gpus": ["H200"]})
    assert only_on([here, here], "two models") == " (two models on one CPU; elsewhere it may be otherwise)"
    assert only_on([here, there]) == " (on H200 and one CPU; elsewhere it may be otherwise)"
    other = replace(here, provenance={"cpu": "Xeon"})
    assert only_on([here, here, other]) == " (on 2 CPUs; elsewhere it may be otherwise)"


def test_every_claim_gets_one_row_and_without_evidence_nothing_counts_as_measured():
    found = table(gpus=0)
    assert len(found.rows) == 167 and sum(found.counts.values()) == 167
    for c, v in found.rows:
        untried = v.word.startswith("needs") or (v.word == "not tried yet" and c.gpus == 0)
        assert untried or v.kind in ("published", "modelled", "") or c.verdict, c.id
        assert v.because


def test_needs_gpus_depends_on_the_machine():
    claim = next(c for c in claims() if c.id == "E14")  # its judge finds no evidence; others say so themselves
    assert judge(claim, gpus=0).word == judge(claim, gpus=1).word == "needs 2 GPUs"
    assert judge(claim, gpus=2).word == "not tried yet"


def test_a_verdict_is_computed_from_the_evidence():
    @verdict("E23")
    def _(evidence):
        r = evidence.one("step_s", ranks=1)
        return Verdict("holds", f"{r.value:g} s per step", r.kind)

    found = table("01", SOME, gpus=0)
    assert found.verdict("E23") == Verdict("holds", "0.025 s per step", "measured")
    assert "0.025 s per step" in repr(found) and "0.025 s per step" in found._repr_html_()
    assert found.counts["holds"] == 1 + sum(c.verdict == "holds" for c, _ in found.rows)


def test_missing_evidence_names_what_is_missing():
    @verdict("E23")
    def _(evidence):
        return Verdict("holds", str(evidence.one("peak_bytes", ranks=4)))

    found = table("01", SOME, gpus=0, strict=True).verdict("E23")
    assert found.word == "not tried yet" and "peak_bytes" in found.because and found.kind == ""


def test_a_failing_function_never_breaks_the_notebook_but_breaks_a_test():
    @verdict("E23")
    def _(evidence):
        return Verdict("holds", str(evidence.where("peak_bytes")[0]))

    found = table("01", SOME, gpus=0).verdict("E23")
    assert found.word == "not tried yet"
    with pytest.raises(IndexError):
        table("01", SOME, gpus=0, strict=True)


def test_what_was_recorded_elsewhere_does_not_count_as_measured_here():
    @verdict("E23")
    def _(evidence):
        return Verdict("holds", "because")

    def kind(*kinds):
        return table("01", [Record("a", "b", "s", (1.0,), k) for k in kinds], gpus=0).verdict("E23").kind

    assert [kind("measured"), kind("recorded"), kind(), kind("published")] == ["measured", "recorded", "", ""]


def test_needs_n_gpus_is_filled_in():
    @verdict("D13")
    def _(evidence):
        return Verdict("needs N GPUs", "one process sees one link", "")

    assert table("07", SOME, gpus=0).verdict("D13").word == "needs 2 GPUs"


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [("probably", "measured", "a verdict is one of"), ("holds", "guessed", "the kind of a verdict")],
)
def test_verdict_words_are_fixed(word, kind, message):
    with pytest.raises(ValueError, match=message):
        Verdict(word, "because", kind)


def test_a_depends_says_whether_cases_differ_or_nothing_could_be_told():
    def because(right, wrong):
        found = judged(right, wrong, "It takes 1 s.")
        assert found.word == "depends"
        return found.because

    no = [False, False, False]
    assert because([True, False, False], [False, True, False]) == "It takes 1 s."
    assert because(no, no) == "This run cannot tell: It takes 1 s."
    assert because([True, True, False], no).startswith(
        "2 of 3 cases are shown to hold, of the rest this run cannot tell: "
    )
    assert because(no, [True, False, False]).startswith(
        "1 of 3 cases is shown to be wrong, of the rest this run cannot tell"
    )
    assert judged([True], [False], "It").word == "holds" and judged([False], [True], "It").word == "does not hold"
    assert judged([False], [True], "It takes 1 s.").because == "It takes 1 s."
    assert depends(True, "cases differ") == Verdict("depends", "cases differ")
    assert depends(False, "it takes 1 s").because == "this run cannot tell: it takes 1 s"
    assert depends(False, "It takes 1 s.").because == "This run cannot tell: It takes 1 s."


def test_registration_errors():
    with pytest.raises(ValueError, match=r"no claim 'Z99'"):
        verdict("Z99")(lambda evidence: None)
    verdict("E23")(lambda evidence: None)
    with pytest.raises(ValueError, match="two verdict functions"):
        verdict("E23")(lambda evidence: None)
    stray = lambda evidence: None  # noqa: E731
    stray.__module__ = "labs.chapters.nb05.claims"
    with pytest.raises(ValueError, match=r"notebook 01, not into nb05"):
        verdict("E23")(stray)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_functions_of_a_notebook_say_not_tried_when_there_is_no_evidence(notebook):
    for claim, found in table(notebook, (), gpus=0, strict=True).rows:
        honest = (
            claim.verdict  # an earlier run decided it
            or found.word == "not tried yet"
            or found.word.startswith("needs")
            or found.kind in ("", "modelled", "published")
        )
        assert honest, f"{claim.id}: {found} without a single record"


def test_what_does_not_hold_comes_first_and_what_has_no_verdict_is_folded_away():
    one, two, three, four, five = claims("02")[:5]
    words = ("holds", "not tried yet", "does not hold", "needs 1 GPU", "depends")
    found = Table(tuple((c, Verdict(w, "because", "")) for c, w in zip(claims("02"), words, strict=False)))
    shown, _, folded = found._repr_html_().partition("<details>")
    order = [
        [c.id for c in sorted(claims("02")[:5], key=lambda c: text.find(f">{c.id}<")) if f">{c.id}<" in text]
        for text in (shown, folded)
    ]
    assert order == [[three.id, five.id, one.id], [four.id, two.id]]
    assert "<summary>2 more without a verdict here: 1 needs more GPUs, 1 not tried yet</summary>" in folded
    assert re.findall(r"^(\w\d\d)  ", repr(found), re.M) == [c.id for c in (three, five, one, four, two)]
    assert [c.id for c, _ in found.rows] == [c.id for c in claims("02")[:5]]
    assert "<details>" not in Table(found.rows[:1])._repr_html_()


def test_a_notebook_shows_fifteen_claims_and_the_first_sentence_of_each_reason():
    found = Table(tuple((c, Verdict("holds", "It takes 1.5 s. No. 2 of 3 took less.", "")) for c in claims()[:17]))
    shown, folded = found._repr_html_().split("<details><summary>2 more with a verdict</summary>")
    assert shown.count("<tr>") == 1 + 15 and folded.count("<tr>") == 1 + 2
    assert "It takes 1.5 s.<details><summary>more</summary>No. 2 of 3 took less.</details>" in shown
    assert "It takes 1.5 s. No. 2 of 3 took less." in folded, "nothing is folded within what is folded"


def test_html_escapes_and_marks_code():
    text = table("08", gpus=0)._repr_html_()
    assert "<code>init_process_group</code>" in text and "<script" not in text
    assert text.count("<tr>") == text.count("<thead>") + len(claims("08")), "a head for each table"


@pytest.fixture
def command(monkeypatch, capsys):
    """`python -m labs.claims` without another start of Python: (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["labs.claims", *args])
        try:
            code = main() or 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


def test_command_json_notebook_and_bad_input(command, tmp_path):
    rows = json.loads(command("--json", "--notebook", "06")[1])
    assert {r["id"] for r in rows} == {c.id for c in claims("06")}
    assert all(r["verdict"] in WORDS or r["verdict"].startswith("needs") for r in rows)
    code, _, told = command("--notebook", "77")
    assert code == 2 and told.count("\n") == 1 and "06" in told
    (tmp_path / "x.jsonl").write_text("{")
    code, _, told = command("--evidence", str(tmp_path / "x.jsonl"))
    assert code == 2 and "line 1" in told and told.count("\n") == 1
