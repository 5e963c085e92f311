"""The facts lab and the verdicts of notebook 03 that rest on it and on the other labs' records."""

import math

import pytest
from again import holds_soon

from labs.kit.claims import table
from labs.kit.launch import launch
from labs.kit.record import Records


def go(lab, **parameters):
    return launch(lab, nproc=2, oversubscribe=True, smoke=True, **parameters)


@pytest.fixture(scope="module")
def evidence():
    runs = [
        go("data_parallel", model="cnn"),
        go("data_parallel", model="mlp"),
        go("ddp_parity"),
        go("crossover"),
        go("ddp_training"),
        go("gradient_accumulation"),
        go("ddp_facts"),
    ]
    return Records(r for run in runs for r in run)


def test_facts_are_those_of_ddp(evidence):
    facts = Records(r for r in evidence if r.lab == "ddp_facts")
    assert facts.one("rows_in_forward").samples == (64, 64)
    assert facts.one("parameters", where="model").value == 658_698
    assert facts.one("parameter_spread", when="before DDP").value > 0
    assert facts.one("parameter_spread", when="after DDP").value == 0
    assert facts.one("relu_mse", output="always 0").value == pytest.approx(1, abs=0.02)
    held = {(r.case["part"], r.case["optimizer"]): r.value for r in facts.where("held_bytes")}
    size = 4 * 658_698
    assert held["buckets", "Adam"] == held["gradients", "SGD"] == held["parameters", "Adam"] == size
    assert held["optimizer", "Adam"] == 2 * size
    assert held["buckets", "SGD"] == held["optimizer", "SGD"] == 0


def test_buffers_travel_before_every_forward_unless_switched_off(evidence):
    sent = {(r.case["model"], r.case["sync_buffers"]): r.value for r in evidence.where("broadcasts_per_step")}
    assert sent == {("cnn_batchnorm", True): 2, ("cnn_batchnorm", False): 0, ("cnn", True): 0}


def test_a_line_at_module_level_runs_in_every_process(evidence):
    assert evidence.one("module_level_runs").value == 3  # the program and its two workers


def test_a_slow_rank_slows_all(evidence):
    def slows_all(facts):
        even, slow = facts.where("step_s_of_fastest_rank")
        assert slow.value > 0.02, "no step is shorter than the sleep in it"
        return slow.value > even.value

    assert holds_soon(slows_all, evidence, lambda: go("ddp_facts"))


EXPECTED = {
    "A01": "does not hold",
    "A05": "does not hold",
    "A09": "does not hold",
    "A11": "holds",
    "A12": "does not hold",
    "A14": "does not hold",
    "A16": "does not hold",
    "A17": "does not hold",
    "A18": "depends",
    "A26": "depends",
    "B01": "depends",
    "B02": "depends",
    "B26": "depends",
    "B34": "depends",
    "B36": "does not hold",
    "B37": "depends",
    "D07": "holds",
    "D08": "does not hold",
    "D12": "does not hold",
    "E13": "does not hold",
    "E15": "holds",
}


@pytest.mark.parametrize("claim", EXPECTED)
def test_verdicts_that_do_not_rest_on_timing(evidence, claim):
    found = table(notebook="03", evidence=evidence).verdict(claim)
    assert found.word == EXPECTED[claim], found.because
    assert found.because


def test_every_verdict_of_the_notebook_finds_its_evidence(evidence):
    from labs.kit.claims import claims, judge, judge_of

    for claim in claims("03"):
        if judge_of(claim) is not None:
            assert judge(claim, evidence, strict=True).word != "not tried yet", claim.id


def test_without_evidence_nothing_is_claimed():
    words = {v.word for _, v in table(notebook="03", evidence=Records()).rows}
    assert not words & {"holds", "depends"} or all(
        v.kind == "published"
        for _, v in table(notebook="03", evidence=Records()).rows
        if v.word in ("holds", "depends")
    )


def test_the_articles_loop_cannot_learn(evidence):
    assert evidence.one("random_label_floor").value == pytest.approx(math.log(10))
