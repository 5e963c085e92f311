"""The claims registry: complete, self-contained, honest about what was not tried."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from labs import chapters
from labs.claims.__main__ import main
from labs.kit import claims as claims_module
from labs.kit import docket
from labs.kit.claims import PAPER, WORDS, Verdict, claims, table, verdict
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


def test_every_claim_gets_one_row_and_without_evidence_nothing_counts_as_measured():
    found = table(gpus=0)
    assert len(found.rows) == 167 and sum(found.counts.values()) == 167
    for c, v in found.rows:
        untried = v.word.startswith("needs") or (v.word == "not tried yet" and c.gpus == 0)
        assert untried or v.kind in ("published", "modelled", "") or c.verdict, c.id
        assert v.because


def test_a_verdict_is_computed_from_the_evidence():
    @verdict("E23")
    def _(evidence):
        r = evidence.one("step_s", ranks=1)
        return Verdict("holds", f"{r.value:g} s per step", r.kind)

    found = table("01", SOME, gpus=0)
    assert found.verdict("E23") == Verdict("holds", "0.025 s per step", "measured")
    assert "0.025 s per step" in repr(found) and "0.025 s per step" in found._repr_html_()
    assert found.counts["holds"] == 1 + sum(c.verdict == "holds" for c, _ in found.rows)


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
