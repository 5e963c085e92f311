"""What the labs of notebook 01 say on a command line: chosen by their records, also by few and by odd ones."""

from __future__ import annotations

import pytest
from test_claims_nb01 import around, batch_size, changing_shapes, make, timing, utilisation, validation

from labs import batch_size as batch_lab
from labs import changing_shapes as shapes_lab
from labs import measure_validation as validation_lab
from labs import timing as timing_lab
from labs import utilisation as utilisation_lab
from labs.kit.record import Records


def said(lab, records):
    return " ".join(lab.answer(Records(records)))


def step(samples, **changes):
    """Records of labs.timing around these step times, in s."""
    kept = [r for r in timing(**changes) if r.metric != "step_s" or r.case["mode"] != "train"]
    extra = [make("timing", "warm_up_steps", "steps", 3, settled=True)]
    ranks = len(changes.get("ranks", (1, 1)))
    train = make("timing", "step_s", "s", samples, ranks=ranks, mode="train", batch_per_rank=10)
    return [*(r for r in kept if ranks > 1 or r.case.get("mode") != "no_sync"), *extra, train]


STEADY = around(1e-3) * 2
TIMING = [
    (step(STEADY, no_sync=0.8), "Of this, exchanging gradients is 2"),
    (step(STEADY, ranks=(1.0,)), "A training step takes"),
    (step(around(1e-3) + around(2e-3), ranks=(1.0,)), "It was not steady: the later half of the timed steps took 2 x"),
    (step(STEADY, ranks=(1.0,), copying=0.4), "40.0 % [39.8, 40.1] if every step copies its batch"),
    (step(STEADY, ranks=(1.0,), device="cpu"), "of the emulated queue"),
]


@pytest.mark.parametrize(("records", "words"), TIMING, ids=range(len(TIMING)))
def test_timing(records, words):
    for r in [r for r in records if r.case.get("mode") == "no_sync"]:
        records[records.index(r)] = make("timing", "step_s", "s", around(8e-4) * 2, mode="no_sync")
    assert words in said(timing_lab, records), said(timing_lab, records)


def test_a_steady_step_on_a_gpu_needs_no_excuse():
    text = said(timing_lab, step(STEADY, ranks=(1.0,), device="cuda"))
    assert "not steady" not in text and "emulated" not in text


def test_batch_size():
    text = said(batch_lab, batch_size(ranks=1))
    assert "2048: 25.6 x" not in text and "25.6 x [" in text and "Of the batches tried, 2048 has" in text
    assert "ranks" not in text
    assert "no more that this run can show" in said(batch_lab, batch_size({4: 1.0, 8: 2.0}, ranks=1))
    assert "Of the batches tried, 4 has" in said(batch_lab, batch_size({4: 1.0}, ranks=1))


def test_utilisation():
    text = said(utilisation_lab, utilisation())
    assert "small products, memory traffic, one number at a time" in text and "wait for data shows" in text
    text = said(utilisation_lab, utilisation(speeds=(1,) * 5, busy=(1,) * 5))
    assert "No job that looked as busy was slower" in text and "does not show" in text


def test_changing_shapes():
    text = said(shapes_lab, changing_shapes())
    assert "per step: 2.0" in text and "no difference that this run can show" in text and "There is no cuDNN" in text
    text = said(shapes_lab, changing_shapes(off=(1.0, 1.0), on=(0.5, 9), device="cuda"))
    assert "fixed shape, seconds per step: 0.499 x" in text and "no cuDNN" not in text


def test_measure_validation():
    text = said(validation_lab, validation())
    assert "one after the other: 1.50" in text and "a difference that is not there" in text
    assert "in turn: 1.00" in text and "no difference, as there is none" in text
    ratio = make("measure_validation", "timer_ratio", "x", around(1.2), function="matrix product")
    assert "torch's Timer differ: matrix product 1.20" in said(validation_lab, [ratio])
    same = make("measure_validation", "timer_ratio", "x", around(1.0), function="matrix product")
    assert "show no difference" in said(validation_lab, [same])
    found = make("measure_validation", "slowdowns_found", "repetitions", 3, arm="+5 %", repetitions=4, pairs=20)
    assert "+5 % in 75.0 % [" in said(validation_lab, [found])
