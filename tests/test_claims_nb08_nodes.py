"""Verdicts of notebook 08 on launching follow the records, and turn when the records turn."""

from __future__ import annotations

import pytest

from labs.chapters.nb08 import claims_nodes
from labs.kit.claim_registry import WORDS, _judges, claims
from labs.kit.record import Record, Records

OWN = ("A06 A23 A24 C04 C18 C19 C20 C21 C24 C25 D09 D10 D11").split()
FACTS = {
    "init without an address": (0, "ValueError: MASTER_ADDR"),
    "main(rank, world_size) without arguments": (0, "TypeError: missing"),
    "python -m torch.multiprocessing": (0, "a package"),
    "spawn passes the rank first": (1, "0 and 1"),
    "import torch brings torch.multiprocessing": (1, "imports it"),
    "torch.distributed.launch is current": (0, "old"),
}
EXPECTED = {
    "A06": "does not hold",
    "A23": "depends",
    "A24": "depends",
    "C04": "depends",
    "C18": "does not hold",
    "C19": "does not hold",
    "C20": "does not hold",
    "C21": "depends",
    "C24": "does not hold",
    "C25": "holds",
    "D09": "does not hold",
    "D10": "holds",
    "D11": "holds",
}


def record(metric, value, **case):
    return Record(
        "two_nodes",
        metric,
        "1",
        (value,),
        case=case,
        layout={"world_size": 1, "rank": 0, "backend": "gloo", "device": "cpu"},
    )


def evidence(turned=False, sums=3.0):
    found = [record("works", float(v != turned), name=name, line=line) for name, (v, line) in FACTS.items()]
    for rank in (0, 1):
        for name, text in (("RANK", str(rank)), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("GROUP_WORLD_SIZE", "2")):
            found.append(record("variable", 1, name=name, text=text, on_rank=rank, node=rank))
        found.append(record("sum", sums, on_rank=rank))
    for setting in ("port taken", "no such interface", "clock off"):
        goes_on = setting == "clock off" or (turned and setting == "port taken")
        found.append(record("went_on", float(goes_on), setting=setting, of=int(goes_on)))
        if not turned:
            found.append(record("told_s", 1.0, setting=setting, line=f"Error of {setting}"))
    return Records(found)


def judge(claim, run):
    return _judges[claim](run)


def test_these_are_claims_of_this_notebook():
    assert set(OWN) <= {c.id for c in claims("08")} and set(OWN) == set(EXPECTED)


@pytest.mark.parametrize("claim", OWN)
def test_the_verdict_that_the_records_give(claim):
    found = judge(claim, evidence())
    assert found.word == EXPECTED[claim] and found.word in WORDS


@pytest.mark.parametrize("claim", ["A06", "A23", "C04", "C19", "C20", "C24", "D09", "D10", "D11"])
def test_a_verdict_turns_with_its_records(claim):
    assert judge(claim, evidence(turned=True)).word != EXPECTED[claim]


def test_a_job_that_stops_without_a_word_was_harmed_by_the_taken_port():
    silent = Records([r for r in evidence() if not (r.metric == "told_s" and r.case["setting"] == "port taken")])
    found = judge("C04", silent)
    assert found.word == "depends" and "none said why" in found.because


@pytest.mark.parametrize("claim", sorted(set(OWN) - {"A03", "C11", "D14"}))
def test_without_records_nothing_is_said(claim):
    with pytest.raises(LookupError):
        judge(claim, Records())


def test_ranks_that_did_not_meet_prove_nothing():
    with pytest.raises(LookupError):
        judge("C25", evidence(sums=1.0))


def test_numbers_verify_what_a_collective_verifies(monkeypatch):
    wrong = judge("C21", evidence(sums=2.0))
    assert wrong.word == "does not hold" and "gives 2" in wrong.because
    assert claims_nodes.connects_late(), "read the documentation of this torch's init_process_group"
    monkeypatch.setattr(claims_nodes, "connects_late", lambda: False)
    assert judge("C21", evidence()).word == "holds"


def test_a_world_of_one_is_named():
    assert "1 of 2 ranks was the whole world" in judge("C21", evidence()).because
