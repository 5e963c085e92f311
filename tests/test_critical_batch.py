"""The critical batch: formulas against arithmetic and simulation, the search for rates, records and sentences."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from labs import critical_batch as lab
from labs.chapters.nb08 import figures_efficiency as figures
from labs.data.fashion import vectors
from labs.kit.check import predict
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records
from labs.parts.data_parallel import scaling

BATCHES = (8, 16, 32, 64, 128, 512, 2048)
WOBBLE = (0.9, 1.0, 1.1, 0.95, 1.05, 1.0)


@pytest.fixture(autouse=True)
def one_thread():
    """As on a rank: two threads that wait for each other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_at_the_critical_batch_steps_and_samples_are_twice_the_fewest():
    assert lab.predict_steps(60, 70, 60) == 140 and 60 * 140 == 2 * (70 * 60)
    assert lab.predict_steps(1, 70, 60) / lab.predict_steps(2, 70, 60) == pytest.approx(61 / 31)
    assert lab.predict_steps(1e9, 70, 60) == pytest.approx(70)


def test_the_fit_finds_what_steps_were_made_from():
    made = [lab.predict_steps(b, 73, 85) for b in BATCHES]
    assert lab.fit_steps(BATCHES, made) == pytest.approx((73, 85))
    assert lab.fit_steps(BATCHES, [500] * 7) == pytest.approx((500, 0), abs=1e-6), "steps that no batch changes"
    assert lab.fit_steps(BATCHES, [4096 / b for b in BATCHES])[1] > 1e6, "batches that always pay"
    with pytest.raises(ValueError, match="two different"):
        lab.fit_steps((8, 8), (3, 4))


def test_a_fit_without_fewest_steps_still_gives_the_steps():
    """Steps that fall faster than batches rise: the best curve has no floor."""
    steps = [800, 390, 190]
    found = lab.fit_steps((8, 16, 32), steps)
    assert all(
        lab.predict_steps(b, *found) == pytest.approx(s, rel=0.05) for b, s in zip((8, 16, 32), steps, strict=True)
    )
    run = records(critical=1e7)
    assert lab.fit_error(run) < 0.01
    said = [*lab.answer(run)]
    assert "cannot tell" in said[0] and "within 0 %" in said[1]
    assert "cannot tell" not in next(iter(lab.answer(records())))


def test_the_quickest_batch_is_named_with_those_that_may_be_as_quick():
    said = [line for line in lab.answer(records()) if line.startswith("Quickest on one rank")]
    assert "cannot tell them apart" in said[0] and "64" in said[0] and "128" in said[0]
    steep = records(step_s=lambda b: 1e-4 * b**2)  # batch 8 by far
    said = [line for line in lab.answer(steep) if line.startswith("Quickest on one rank")]
    assert "batch 8," in said[0] and "cannot tell" not in said[0]


def test_the_noise_scale_of_gradients_that_are_known():
    draw = np.random.default_rng(0)
    true, spread, rows = np.array([3.0, 4.0]), 5.0, 20_000
    norms = {}
    for size in (4, 32):
        gradients = true + spread * draw.normal(size=(rows, 2)) / math.sqrt(size)
        norms[size] = (gradients**2).sum(axis=1).mean()
    squared, trace = lab.noise_scale(norms[4], norms[32], 4, 32)
    assert squared == pytest.approx(25, rel=0.05) and trace == pytest.approx(2 * spread**2, rel=0.05)


def test_single_samples_against_gradients_one_by_one():
    data = vectors(64, torch.device("cpu"))
    model = lab.perceptron(1, torch.device("cpu"))
    each = torch.stack([lab.flat_gradient(model, data[0][i : i + 1], data[1][i : i + 1]) for i in range(64)]).double()
    [found] = _on_one_rank(_from_samples, 64)
    mean, trace = each.mean(0), each.var(0, unbiased=True).sum().item()
    assert found[1] == pytest.approx(trace, rel=1e-4)
    assert found[0] == pytest.approx(mean.square().sum().item() - trace / 64, rel=1e-3, abs=1e-6)


def _on_one_rank(body, *args):
    from labs.kit.launch import run_on_ranks

    return run_on_ranks(body, 1, *args)


def _from_samples(rows):
    from types import SimpleNamespace

    device = torch.device("cpu")
    rank = SimpleNamespace(rank=0, world_size=1, device=device)
    return lab.from_samples(lab.perceptron(1, device), vectors(64, device), rank, rows)


@pytest.mark.parametrize("best", range(6))
@pytest.mark.parametrize("batch", [8, 64, 2048])
def test_the_search_finds_the_bottom_of_a_valley_from_any_side(best, batch):
    config, tried = lab.Config(), []

    def steps(lr, most):
        tried.append(lr)
        found = 100 * 2 ** abs(config.rates.index(lr) - best)
        return found if found <= most else None

    assert lab.best_rate(config, batch, steps) == config.rates[best]
    assert len(tried) == len(set(tried)), "no rate is tried twice"


def test_the_search_goes_down_where_the_first_rate_diverges():
    config = lab.Config()
    found = lab.best_rate(config, 2048, lambda lr, most: None if lr > 0.03 else min(most, 5000))
    assert found in config.rates


def test_a_training_stops_when_the_loss_is_there_and_not_before():
    data = vectors(lab.IMAGES, torch.device("cpu"))
    easy, hard = (lab.steps_to_target(64, 0.2, 0, data, target, 400) for target in (1.8, 0.9))
    assert 0 < easy < hard < 400
    assert lab.steps_to_target(64, 0.2, 0, data, 0.9, hard - 1) is None
    assert lab.steps_to_target(64, 1e6, 0, data, 0.9, 400) is None, "a loss that is no number any more"


def records(critical=85.0, step_s=lambda b: 1e-4 + 1e-6 * b, noise=(40.0, 90.0), missed=(), seed=0):
    config, layout = {"target": 0.6}, {"world_size": 2, "rank": None, "backend": "gloo", "device": "cpu"}
    dice, rows = random.Random(seed), []

    def add(metric, unit, samples, **case):
        rows.append(Record("critical_batch", metric, unit, samples, "measured", case, config, layout))

    for b in BATCHES:
        add("steps_to_target", "steps", [k * lab.predict_steps(b, 70, critical) for k in WOBBLE], batch=b, lr=0.1)
        add("missed", "runs", [float(b in missed)], batch=b, lr=0.1)
        add("step_s", "s", [step_s(b) * dice.uniform(0.95, 1.05) for _ in WOBBLE], way="one rank", batch=b)
        add(
            "step_s", "s", [(1e-3 + step_s(b) / 2) * dice.uniform(0.95, 1.05) for _ in WOBBLE], way="all ranks", batch=b
        )
    for step, scale in enumerate(noise):
        for method, factor in (("norms of ranks", 1.1), ("single samples", 1.0)):
            add("noise_scale", "samples", [factor * scale], method=method, step=step, loss=1.0)
    return Records(rows)


def test_records_give_back_what_they_were_made_from():
    run = records()
    fewest, batch = lab.critical(run)
    assert fewest.value == pytest.approx(70) and fewest.low < 70 < fewest.high
    assert batch.value == pytest.approx(85), "a seed that is slow with all batches has the same critical batch"
    assert lab.fit_error(run) < 1e-6
    seconds = lab.time_to_target(run)
    best, found = lab.quickest(run)
    assert best in (64, 128) and found == seconds[best], "sqrt(85 x 100) = 92"
    assert all(e.low <= e.value <= e.high for e in seconds.values())
    assert lab.quickest(run, "all ranks")[0] == 512, "sqrt(85 x 2200) = 430"


def test_a_batch_with_a_seed_that_missed_is_left_out():
    assert 2048 not in lab.steps(records(missed=(2048,))) and 512 in lab.steps(records(missed=(2048,)))
    assert any("no curve" in line for line in lab.answer(records(missed=BATCHES[1:])))


def test_sentences_and_figures_follow_the_records(monkeypatch):
    said, alts = [], []
    monkeypatch.setattr(figures, "say", said.append)
    monkeypatch.setattr(figures, "show", lambda fig, alt: alts.append(alt))
    run = records()
    figures.steps_figure(run, predict(85, "critical batch", unit="samples"))
    figures.time_figure(run, predict(64, "quickest batch"))
    assert "inside of the range" in said[0] and "1.10 to 1.10 times" in said[0]
    assert "times as slow" in said[1] and "about 85 the steps are twice the fewest" in alts[0]
    assert "outside of the range" in figures.noise_text(records(noise=(200.0, 900.0)))
    near = {8: Estimate(2.0, 1.8, 2.2, 5), 16: Estimate(1.0, 0.9, 1.1, 5), 32: Estimate(1.2, 1.05, 1.3, 5)}
    assert figures._near(near) == [16, 32] and "it may be 16 or 32" in figures._tied(near), "intervals that overlap"
    assert figures._tied({8: near[8], 16: near[16]}) == ""
    table = figures.two_efficiencies(run)
    assert table["statistical"].iloc[0] == "91%" and table["hardware"].iloc[-1] == "100%"
    assert any("twice as many at the critical batch, 85.0 samples" in line for line in lab.answer(run))


def strong(speedup, n=2):
    layout = {"world_size": n, "rank": None, "backend": "gloo", "device": "cpu"}
    rows = [("single", 1, 1.0, 128), ("ddp", n, 1 / speedup, 128 // n)]
    return Records(
        Record(
            "data_parallel",
            "step_s",
            "s",
            [t * k for k in WOBBLE],
            "measured",
            {"mode": mode, "ranks": ranks, "batch_per_rank": batch},
            {},
            layout,
        )
        for mode, ranks, t, batch in rows
    )


def test_two_laws_from_one_share(monkeypatch):
    assert figures.serial_share(strong(2.0)).value == 0 and figures.serial_share(strong(2.2)).value == 0
    assert figures.serial_share(strong(1.6)).value == pytest.approx(0.25)
    assert scaling.gustafson(0.25, 2) == 1.75 and scaling.Amdahl(0.25, 0.75).speedup(2) == pytest.approx(1.6)
    assert scaling.gustafson(0.0, 64) == 64 and scaling.gustafson(1.0, 64) == 1
    with pytest.raises(BadInput, match="between 0 and 1"):
        scaling.gustafson(1.2, 2)
    said, alts = [], []
    monkeypatch.setattr(figures, "say", said.append)
    monkeypatch.setattr(figures, "show", lambda fig, alt: alts.append(alt))
    weak = Records(
        [
            strong(1.0)[0],
            Record(
                **{
                    **vars(strong(1.0)[1]),
                    "samples": tuple(k * 2 / 1.75 for k in WOBBLE),
                    "case": {"mode": "ddp", "ranks": 2, "batch_per_rank": 128},
                }
            ),
        ]
    )
    figures.two_laws(strong(1.6), weak, predict(1.8, "weak scaling", unit="x"))
    assert "then says 1.75 x" in said[0] and "within the interval" in said[0] and "25%" in alts[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batches": (8, 16)}, "at least 3"),
        ({"batches": (8, 8, 16)}, "must be different"),
        ({"batches": (8, 16, 100_000)}, "between 1 and 8192"),
        ({"rates": (0.2, 0.1)}, "must rise"),
        ({"rates": ()}, "rates must be positive"),
        ({"target": 3.0}, "between 0 and 2.3"),
        ({"most_steps": 0}, "at least 1"),
        ({"seeds": 0}, "at least 1"),
        ({"seconds": 0.0}, "positive"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        lab.Config(**values)


def test_two_ranks_train_search_and_agree_on_the_noise():
    run = launch("critical_batch", 2, batches=(32, 128, 512), target=1.2, seeds=2, seconds=0.5)
    by = lab.steps(run)
    assert set(by) == {32, 128, 512} and all(len(r.samples) == 2 for r in run.where("steps_to_target"))
    assert by[32].value > by[512].value, "smaller batches need more steps"
    again = launch("critical_batch", 1, batches=(32, 128, 512), target=1.2, seeds=2, seconds=0.5)
    assert {r.case["lr"] for r in run.where("missed")} == {r.case["lr"] for r in again.where("missed")}
    assert {b: e.value for b, e in lab.steps(again).items()} == {b: e.value for b, e in by.items()}, "by seed alone"
    assert not len(again.where("step_s", way="all ranks")) and len(run.where("step_s", way="all ranks")) == 3
    ranks, single = lab.noise(run), lab.noise(run, "single samples")
    pairs = [(ranks[s], single[s]) for s in ranks if s in single]
    assert len(pairs) >= 3 and sum(1 / 3 < a / b < 3 for a, b in pairs) >= len(pairs) - 1
