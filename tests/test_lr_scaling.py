"""The rate by closed form, trainings paired by seed and shared out, divergence recorded, sums over records."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from labs import lr_scaling as lab
from labs.chapters.nb01 import figures_batch
from labs.data.fashion import vectors
from labs.kit.check import predict
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

SMALL = {"epochs": 1, "samples": 1024, "factors": (1, 4, 32), "rates": (8.0,), "seeds": 3, "oversubscribe": True}
CONFIG = lab.Config(samples=1024, epochs=1, factors=(1, 16))


@pytest.fixture(scope="module")
def data():
    return vectors(CONFIG.samples, torch.device("cpu"))


@pytest.fixture(scope="module")
def run():
    return launch("lr_scaling", 2, **SMALL)


FINAL = {
    "same": 0.1,
    "linear": 1.6,
    "linear, warm-up": 1.6,
    "sqrt, warm-up": 0.4,
    "AdamW, linear, warm-up": 1.6,
    "AdamW, sqrt, warm-up": 0.4,
}


@pytest.mark.parametrize("rule", lab.RULES)
def test_the_rate_starts_rises_and_stays(rule):
    rates = [lab.learning_rate(step, 0.1, 16, rule, 10) for step in range(30)]
    warm = "warm-up" in rule
    assert rates[0] == pytest.approx(0.1 if warm else FINAL[rule])
    assert rates[10:] == pytest.approx([FINAL[rule]] * 20)
    if warm:  # a straight line
        rises = [b - a for a, b in pairwise(rates[:11])]
        assert rises == pytest.approx([(FINAL[rule] - 0.1) / 10] * 10)


@pytest.mark.parametrize("rule", lab.RULES)
def test_with_factor_1_or_no_warm_up_steps_there_is_nothing_to_rise(rule):
    assert {lab.learning_rate(step, 0.1, 1, rule, 10) for step in range(20)} == {0.1}
    assert lab.learning_rate(0, 0.1, 16, rule, 0) == pytest.approx(FINAL[rule])


def test_final_rates_and_steps_of_the_default():
    config = lab.Config()
    assert lab.final_rate(config, "linear, warm-up", 16) == pytest.approx(16 * config.base_lr)
    assert lab.final_rate(config, "sqrt, warm-up", 16) == pytest.approx(4 * config.base_lr)
    assert lab.final_rate(config, "AdamW, sqrt, warm-up", 16) == pytest.approx(4 * config.adamw_lr)
    assert lab.predict(config) == {f: 12 * 8192 // (32 * f) for f in config.factors}


def test_every_different_training_is_done_once():
    config = lab.Config()
    todo = lab.trainings(config, 0)
    sgd = 1 + 4 * (len(config.factors) - 1) + len(config.rates)
    assert len(todo) == len(set(todo)) == sgd + 1 + 2 * (len(config.adamw_factors) - 1)
    assert [t.factor for t in todo] == sorted(t.factor for t in todo)


def test_a_rate_that_a_rule_has_tried_is_not_tried_again():
    assert len(lab.trainings(lab.Config(rates=(1.0,)), 0)) == len(lab.trainings(lab.Config(rates=()), 0))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_seed_fixes_start_and_order_whatever_the_rule(data):
    # With rate x factor = 16 x 0.001 all along, "linear" is "same" with 0.016: bit for bit, if start and order agree.
    a = lab.train(lab.Training("linear", 16, 0.001, 5), data, CONFIG)
    b = lab.train(lab.Training("same", 16, 0.016, 5), data, CONFIG)
    other = lab.train(lab.Training("same", 16, 0.016, 6), data, CONFIG)
    assert torch.equal(weights(a), weights(b))
    assert not torch.equal(weights(a), weights(other))


def test_warm_up_changes_the_training_only_while_it_lasts(data):
    plain, warm, none = (
        weights(lab.train(lab.Training(rule, 16, 0.01, 0), data, replace(CONFIG, warm_up_share=share)))
        for rule, share in (("linear", 0.5), ("linear, warm-up", 0.5), ("linear, warm-up", 0.0))
    )
    assert torch.equal(plain, none) and not torch.equal(plain, warm)


def test_training_learns(data):
    accuracy, loss = lab.evaluate(lab.train(lab.Training("same", 1, 0.01, 0), data, replace(CONFIG, epochs=3)), data)
    assert accuracy > 0.65 and loss < 0.9


def test_a_model_of_nans_is_recorded_as_a_guess(data):
    model = lab.train(lab.Training("same", 1, 1e18, 0), data, CONFIG)
    assert not torch.isfinite(weights(model)).all()
    assert lab.evaluate(model, data) == (pytest.approx(0.1), pytest.approx(math.log(10)))


def test_records_hold_every_rule_batch_and_seed(run):
    cases = [(rule, f) for f in SMALL["factors"] for rule in lab.RULES if f == 1 or not rule.startswith("AdamW")]
    for metric, samples in (("test_accuracy", 3), ("train_loss", 3), ("diverged", 1)):
        found = run.where(metric)
        assert [(r.case["rule"], r.case["factor"]) for r in found] == cases
        assert all(len(r.samples) == samples and r.case["batch"] == 32 * r.case["factor"] for r in found)
    assert {r.case["lr"] for r in run.where("test_accuracy", rule="linear", factor=32)} == {32 * 0.02}
    assert run.one("accuracy_at_rate").case == {"factor": 32, "batch": 1024, "lr": 0.16}


def test_with_factor_1_all_rules_of_an_optimizer_are_one(run):
    assert len({r.samples for r in run.where("test_accuracy", factor=1)}) == 2
    assert {r.case["lr"] for r in run.where("test_accuracy", factor=1)} == {0.02, 0.002}
    assert len({r.samples for r in run.where("test_accuracy", factor=32)}) > 1


def test_one_rank_finds_what_two_find(run):
    alone = launch("lr_scaling", 1, **SMALL)
    for a, b in zip(run, alone, strict=True):
        assert (a.metric, a.case) == (b.metric, b.case)
        assert a.samples == pytest.approx(b.samples, abs=0.02)


def test_diverged_trainings_are_counted_not_dropped():
    run = launch(
        "lr_scaling", 1, **(SMALL | {"factors": (1, 32), "rules": ("same", "linear"), "base_lr": 1e6}), smoke=True
    )
    assert [r.value for r in run.where("diverged")] == [2, 2, 2, 2]  # smoke: two seeds
    assert all(len(r.samples) == 2 and max(r.samples) < 0.5 for r in run.where("test_accuracy"))
    assert all(set(r.samples) == {lab.GUESS_LOSS} for r in run.where("train_loss"))


def records(**accuracies):
    """`linear_4=[...]`: test accuracy by rule and factor."""
    return Records(
        Record("lr_scaling", "test_accuracy", "1", samples, case={"rule": rule, "factor": int(factor), "lr": 0.1})
        for name, samples in accuracies.items()
        for rule, factor in [name.split("_")]
    )


BASE = [0.80, 0.84, 0.82, 0.86, 0.88, 0.84]


def test_changes_are_judged_seed_by_seed():
    found = records(linear_1=BASE, linear_4=[a - 0.02 for a in BASE])
    change = lab.change(found)["linear", 4]
    assert (change.value, change.low, change.high) == pytest.approx((-0.02, -0.02, -0.02))  # BASE spreads by 0.08
    assert lab.difference(found, ("linear", 1), ("linear", 4)).value == pytest.approx(0.02)
    assert lab.accuracy(found)["linear", 1].value == 0.84


def wide(change):
    """BASE and a change that scatters by five points."""
    return [a + change + 0.05 * (-1) ** k for k, a in enumerate(BASE)]


def test_a_rule_keeps_loses_or_cannot_be_told():
    found = records(
        linear_1=BASE,
        linear_4=[a - 0.005 for a in BASE],
        linear_16=wide(0),
        linear_64=[a - 0.05 for a in BASE],
        same_1=BASE,
        same_4=[a - 0.02 for a in BASE],
        same_16=BASE,
        same_64=BASE,
    )
    assert lab.judged(found, "linear") == {4: "keeps", 16: "cannot be told", 64: "loses"}
    assert (lab.keeps_until(found, "linear"), lab.loses_from(found, "linear")) == (4, 64)
    assert (lab.keeps_until(found, "same"), lab.loses_from(found, "same")) == (1, 4)
    few = records(linear_1=BASE[:5], linear_4=[a - 0.5 for a in BASE[:5]])
    assert lab.judged(few, "linear") == {4: "cannot be told"}, "five differences have no interval of 95 %"
    assert (lab.keeps_until(found, "same", 0.03), lab.loses_from(found, "same", 0.03)) == (64, None)


def test_the_answer_says_keeps_loses_or_cannot_be_told():
    lost = [a - 0.05 for a in BASE]
    found = Records(
        replace(r, case=r.case | {"batch": 32 * r.case["factor"]})
        for r in records(linear_1=BASE, linear_4=BASE, linear_16=wide(0), linear_64=lost, same_1=BASE, same_64=lost)
    )
    first, second, best = lab.answer(found)
    assert first == (
        "Rate linear: keeps all but a point of accuracy at batch 128; loses more than a point at 2048; "
        "6 seeds cannot tell at 512."
    )
    assert second == "Rate same: loses more than a point at 2048."
    assert "-5.00 points [-5.00, -5.00] of accuracy against batch 32" in best


def test_the_best_rate_is_looked_for_among_rules_and_rates():
    at_rate = Record("lr_scaling", "accuracy_at_rate", "1", (0.7, 0.75), case={"factor": 64, "lr": 0.3})
    found = records(linear_1=BASE, linear_64=[0.6, 0.62]) + Records([at_rate])
    assert lab.best_rate(found)[0] == 0.3
    assert lab.best_rate(found)[1].value == pytest.approx(0.725)
    assert lab.best_rate(records(linear_1=BASE, linear_64=[0.6, 0.62]))[0] == 0.1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"factors": (4, 16)}, "hold 1"),
        ({"factors": ()}, "hold 1"),
        ({"factors": (1, 0)}, "must be positive"),
        ({"factors": (1, 3)}, "multiple of every batch .* 8192 of .96."),
        ({"factors": (1, 4, 4)}, "must be different"),
        ({"rules": ("same", "same")}, "must be different"),
        ({"samples": 0}, "samples must be between 1 and 10000"),
        ({"samples": 60_000}, "samples must be between 1 and 10000"),
        ({"base_batch": 0}, "base_batch must be at least 1"),
        ({"base_lr": 0.0}, "base_lr must be positive"),
        ({"base_lr": math.nan}, "base_lr must be positive"),
        ({"warm_up_share": 1.5}, "warm_up_share must be between 0 and 1"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"adamw_lr": 0.0}, "adamw_lr must be positive"),
        ({"adamw_factors": (16,)}, "adamw_factors must hold 1"),
        ({"rates": (-1.0,)}, "rates must be positive"),
        ({"rules": ()}, "rules must name"),
        ({"rules": ("cosine",)}, "rules"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seconds": 0.0}, "seconds must be a positive number"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("lr_scaling", **values)
    assert "\n" not in str(e.value)


def test_a_slow_machine_has_fewer_batches_with_the_fewest_seeds():
    config, epoch_s = lab.Config(), {1: 0.15, 8: 0.02, 16: 0.011, 32: 0.008, 64: 0.007}
    kept = [lab.affordable(config, {f: k * s for f, s in epoch_s.items()}, 2) for k in (1, 1.3, 3, 100)]
    assert kept == [config.factors, (1, 16, 32, 64), (1, 32, 64), (1, 32, 64)]
    assert lab.affordable(config, {f: 0.65 * s for f, s in epoch_s.items()}, 1) == kept[1], "half of the ranks"


def test_a_budget_ends_after_whole_seeds_and_says_what_was_left_out(monkeypatch):
    given = {**SMALL, "seeds": None, "factors": (1, 4, 16, 32)}
    short, long = (launch("lr_scaling", 2, seconds=s, **given) for s in (0.001, 2.0))
    assert short.one("left_out").case["factor"] == 4 and not len(short.where("test_accuracy", factor=4))
    assert "would take more than 0.001 s" in short.one("left_out").case["why"]
    assert {len(r.samples) for r in short.where("test_accuracy")} == {6}
    [n] = {len(r.samples) for r in long.where("test_accuracy", factor=32)}
    assert n >= 6 and n % 2 == 0 and n <= lab.MOST_SEEDS
    same = [r.where("test_accuracy", factor=32, rule="linear")[0].samples[:6] for r in (short, long)]
    assert same[0] == pytest.approx(same[1], abs=0.02), "the same seeds, whatever the time"
    said = []
    monkeypatch.setattr(figures_batch, "say", said.append)
    monkeypatch.setattr(figures_batch, "show", lambda fig, alt: said.append(alt))
    figures_batch.lr_figure(short, predict(512, "largest batch of linear scaling"))
    assert "* Not tried here: batch 128, as with it 6 seeds" in said[-1] and "of 6 differences" in said[-1]
