"""The claims: all there, each with a verdict that its records decide, and honest about what was not tested."""

from __future__ import annotations

import re
import sys

import pytest

from labs.claims import __main__ as command
from labs.claims import all_claims, registry
from labs.claims.registry import HOW, PAPER, SIGNS, Verdict, claims, how_decided, judge, recorded_verdict, verdict
from labs.kit import claim_records
from labs.kit.record import Record, Records, load

SOME = Records([Record("data_parallel", "step_s", "s", (0.02, 0.03), case={"ranks": 1})])
COMPUTED = sorted({c.notebook for c in claims() if not c.verdict})


@pytest.fixture
def own_judges(monkeypatch):
    """Judges registered in a test are gone after it. These tests judge E23 and D13 themselves."""
    for claim in claims():
        registry.judge_of(claim)
    monkeypatch.setattr(registry, "_judges", {c: j for c, j in registry._judges.items() if c not in ("E23", "D13")})


def test_all_167_claims_are_there_and_complete():
    rows = claims()
    assert len(rows) == 167
    assert {c.id[0] for c in rows} == set(registry.articles()) == set("ABCDE")
    for c in rows:
        assert c.paper in PAPER and c.gpus in (0, 1, 2) and re.fullmatch(r"\d\d", c.notebook), c.id
        assert re.fullmatch(r"\d+(-\d+)?(, \d+(-\d+)?)*", c.lines), c.id
        assert c.changes, f"{c.id} doesn't say what would change its verdict"
        assert bool(c.verdict) == bool(c.because) == bool(c.decided), c.id
        assert not c.verdict or registry.judge_of(c) is None, f"{c.id} has a verdict and a function"


def test_every_claim_is_decided_by_the_committed_records():
    for claim in claims():
        found = recorded_verdict(claim)
        assert found.word != "not tried yet", f"{claim.id}: {found.because}"
        assert how_decided(claim, found) in HOW
        if found.word.startswith("needs"):
            assert claim.command.startswith(("python ", "make ", "torchrun ")), claim.id
    table = all_claims()
    assert len(table) == 167 and set(table["verdict"]) == {*SIGNS, "not tested"} and set(table["how"]) == set(HOW)


@pytest.mark.parametrize("notebook", COMPUTED)
def test_nothing_counts_as_measured_without_a_record(notebook):
    for claim in claims(notebook):
        found = judge(claim, (), strict=True)
        untried = found.word.startswith("needs") or found.word == "not tried yet"
        assert claim.verdict or untried or found.kind in ("", "modelled", "published"), claim.id


def test_a_verdict_is_computed_from_records(own_judges):
    @verdict("E23")
    def e23_reads_a_record(records):
        r = records.one("step_s", ranks=1)
        return Verdict("holds", f"{r.value:g} s per step", r.kind)

    claim = registry.by_id("e23")
    assert judge(claim, SOME) == Verdict("holds", "0.025 s per step", "measured")
    assert judge(claim, []).word == "not tried yet"


def test_a_failing_function_never_breaks_a_page_but_breaks_a_test(own_judges):
    verdict("E23")(lambda records: Verdict("holds", str(records.where("peak_bytes")[0])))
    assert judge(registry.by_id("E23"), SOME).word == "not tried yet"
    with pytest.raises(IndexError):
        judge(registry.by_id("E23"), SOME, strict=True)


@pytest.mark.parametrize(
    ("kind", "found"), [("measured", "measured"), ("recorded", "recorded"), ("published", ""), (None, "")]
)
def test_what_was_recorded_elsewhere_is_not_measured_here(own_judges, kind, found):
    verdict("E23")(lambda records: Verdict("holds", "because"))
    given = [Record("a", "b", "s", (1.0,), kind)] if kind else []
    assert judge(registry.by_id("E23"), given).kind == found


def test_registration_errors(own_judges):
    with pytest.raises(ValueError, match=r"no claim 'Z99'"):
        verdict("Z99")(lambda records: None)
    verdict("E23")(lambda records: None)
    with pytest.raises(ValueError, match="two verdict functions"):
        verdict("E23")(lambda records: None)
    stray = lambda records: None  # noqa: E731
    stray.__module__ = "labs.claims.nb05"
    with pytest.raises(ValueError, match=r"notebook 01, not into nb05"):
        verdict("E23")(stray)


@pytest.mark.parametrize(
    ("right", "wrong", "found", "starts"),
    [
        ([True, True], [False, False], "holds", "why"),
        ([False, False], [True, True], "does not hold", "why"),
        ([True, False], [False, True], "depends", "why"),
        ([False, False], [False, False], "depends", "inconclusive in this run: why"),
        ([True, False], [False, False], "depends", "1 of 2 cases is shown to hold; the rest are inconclusive: why"),
    ],
)
def test_inconclusive_samples_are_not_cases_that_differ(right, wrong, found, starts):
    assert registry.verdict_for(right, wrong, "why") == Verdict(found, starts)


def test_records_are_kept_in_a_kernel_and_never_of_a_smoke_run(tmp_path, monkeypatch):
    monkeypatch.setenv(claim_records.FOLDER, str(tmp_path))
    monkeypatch.delenv("COURSE_SMOKE", raising=False)
    claim_records.keep("03", SOME)
    shell = type("IPython", (), {"get_ipython": staticmethod(lambda: object())})
    monkeypatch.setitem(sys.modules, "IPython", shell)
    claim_records.keep("03", Records([Record("a", "b", "s", (1.0,), config={"smoke": True})]))
    assert not list(tmp_path.iterdir())
    claim_records.keep("03", SOME)
    assert [r.metric for r in claim_records.kept("03")] == ["step_s"]


def test_recorded_files_are_whole():
    for path in claim_records.RECORDED.glob("*.jsonl"):
        assert all(r.kind != "measured" for r in load(path))


def test_the_command_prints_one_and_filters_many(monkeypatch, capsys, tmp_path):
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["labs.claims", *args])
        try:
            code = command.main()
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()

    code, out, _ = run("B46")
    assert code == 0 and "labs.claims.nb03" in out and "would change it" in out
    code, out, _ = run("--subject", "memory", "--verdict", "does not hold")
    ids = re.findall(r"^([A-E]\d\d)  does not hold", out, re.M)
    assert code == 0 and {registry.by_id(i).subject for i in ids} == {"memory"}
    assert not re.search(r"^[A-E]\d\d  (?!does not hold)", out, re.M)
    SOME.save(tmp_path / "some.jsonl")
    assert "not tried yet" in run("A20", "--evidence", str(tmp_path / "some.jsonl"))[1]
    for args, said in ((["C99"], "C99"), (["--notebook", "77"], "06"), (["--subject", "memroy"], "memory")):
        code, out, err = run(*args)
        assert code == 2 and said in err and out == "" and err.count("\n") == 1
