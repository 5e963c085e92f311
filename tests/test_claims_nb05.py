"""Verdicts of notebook 05, from the records of an H200 and made-up records."""

import pytest

from labs.claims import nb05
from labs.kit.notebook import recorded
from labs.kit.record import Record, Records


def test_an_h200s_records_are_read():
    run = recorded("activation_checkpointing")
    assert nb05.b12_checkpointing_costs_20_percent(run).word == "does not hold"
    assert nb05.b14_checkpointing_caches_intermediate_results(run).word == "depends"
    assert nb05.a27_memory_can_be_estimated_beforehand(recorded("memory_oracle")).word == "holds"


def steps(**ratios):
    return Records(
        Record(
            "activation_checkpointing",
            "step_s",
            "s",
            [ratio * k for k in (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)],
            case={"part": "pareto", "policy": policy},
            config={"model": "deep_mlp"},
        )
        for policy, ratio in ({"none": 1.0} | ratios).items()
    )


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ({"block": 1.2, "stage": 1.19}, "holds"),
        ({"block": 1.5}, "does not hold"),
        ({"block": 1.5, "stage": 1.2}, "depends"),
    ],
)
def test_prices_decide(ratios, word):
    assert nb05.b12_checkpointing_costs_20_percent(steps(**ratios)).word == word
