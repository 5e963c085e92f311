"""Labs of notebook 05, half A: they run, their answers and categories read records, wrong values are refused."""

import pytest
import torch

from labs import activation_checkpointing, memory_oracle, memory_remedies
from labs.common import oracle
from labs.common.models.large_models import bert
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.notebook import recorded
from labs.kit.record import Record, Records

NOISE = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005, 1.0, 0.99, 1.01)


def test_the_lab_and_the_oracle_agree_on_bert_large():
    run = launch("memory_oracle", 1, policies=("none",))
    peak = sum(r.value for r in run.where("peak_bytes", part="model"))
    assert peak == oracle.step(lambda: bert(None, 512), 8, optimizer="adam", target="cuda").peak_bytes
    timeline = [sum(parts) for parts in zip(*(r.samples for r in run.where("timeline_bytes", phase="backward")))]  # noqa: B905
    assert max(timeline) == peak and abs(memory_oracle.errors(run)["tiny_bert, 32 rows, policy none"]) < 0.005
    assert any("GB at the peak, in backward: activations" in line for line in memory_oracle.answer(run))


def test_an_h200s_steps_are_read():
    errors = memory_oracle.errors(recorded("memory_oracle"))
    assert len(errors) >= 4 and max(map(abs, errors.values())) < 0.005


def test_your_own_model_and_a_card():
    run = launch("memory_oracle", 1, model="char_gpt", batch=16, policies=("block",), memory_gb=0.1)
    assert 1 < run.one("largest_batch").value < 10_000
    assert any("The largest batch in 0.1 GB is" in line for line in memory_oracle.answer(run))


def test_recomputing_keeps_the_gradients_and_less_memory():
    run = launch("activation_checkpointing", 1, smoke=True)
    assert {r.value for r in run.where("gradient_difference")} == {0.0}
    kept = {r.case["policy"]: r.value for r in run.where("saved_bytes")}
    assert kept["segments:24"] < kept["none"] / 5
    flops = {r.case["policy"]: r.value for r in run.where("flops")}
    assert flops["segments:24"] / flops["none"] == pytest.approx(4 / 3, rel=0.02)


def test_what_an_h200_paid():
    run = recorded("activation_checkpointing")
    assert activation_checkpointing.category(run) == "more"
    assert any("segments:24: 36.3 MB" in line for line in activation_checkpointing.answer(run))


def step_s(lab, name, **ratios):
    return Records(
        Record(lab, "step_s", "s", [ratio * k for k in NOISE], case={"part": "pareto", name: case.replace("_", " ")})
        for case, ratio in ratios.items()
    )


@pytest.mark.parametrize(("ratio", "word"), [(1.5, "more"), (1.1, "less"), (1.2, "inconclusive")])
def test_recomputing_is_judged_by_20_percent(ratio, word):
    run = Records([*step_s("a", "policy", none=1.0), *step_s("a", "policy", **{"segments:24": ratio})])
    assert activation_checkpointing.category(run) == word


@pytest.mark.parametrize(
    ("recompute", "word"),
    [(1.5, "recomputing costs most"), (1.0, "recomputing doesn't cost most"), (1.11, "inconclusive")],
)
def test_recomputing_is_compared_with_what_is_cheaper(recompute, word):
    ratios = {"as it is": 1.0, "fused attention": 1.0, "4 micro-batches": 1.11, "each layer recomputed": recompute}
    assert memory_remedies.category(step_s("m", "remedy", **ratios)) == word


def test_each_remedy_takes_memory_away_and_trains_the_same():
    run = launch("memory_remedies", 1, smoke=True)
    peaks = memory_remedies.peaks(run)
    assert all(peaks[name] < peaks["as it is"] for name in list(peaks)[1:])
    assert len(list(memory_remedies.answer(run))) == 5
    config = memory_remedies.Config(tokens=16)
    whole, parts = (
        memory_remedies.training_step(config, remedy, torch.device("cpu"))
        for remedy in ({}, {"micro_batches": 4, "policy": "block"})
    )
    assert len(parts.args[2]) == 4 and len(whole.args[2]) == 1


@pytest.mark.parametrize(
    ("lab", "values", "word"),
    [
        (memory_oracle, {"tokens": 600}, "tokens"),
        (memory_oracle, {"model": "nothing"}, "nothing"),
        (memory_oracle, {"micro_batches": 9}, "micro_batches"),
        (activation_checkpointing, {"policies": ("block", "none")}, "policies"),
        (memory_remedies, {"batch": 6}, "batch"),
    ],
)
def test_bad_input_is_one_line(lab, values, word):
    with pytest.raises(BadInput, match=word):
        lab.Config(**values)
