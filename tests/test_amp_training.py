"""Trainings paired by seed and shared out, gradients counted right, what FP16 loses predicted and then found."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from labs import amp_training as lab
from labs.amp_training import gradient_sizes as sizes
from labs.common.data.fashion import vectors
from labs.common.models import Workload
from labs.common.precision.amp import NO_SCALING
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import differs
from labs.kit.record import Record, Records

CPU = torch.device("cpu")
CONFIG = lab.Config(samples=1024, batch=128, epochs=2, seeds=2)
FORMATS = ("fp32", "bf16", "fp16", NO_SCALING)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in a rank: for layers this small, threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data():
    return vectors(CONFIG.samples, CPU)


@pytest.fixture(scope="module")
def run():
    return launch(
        "amp_training",
        2,
        smoke=True,
        samples=512,
        loss_exponents=(0, -14),
        gradient_models=("char_gpt",),
        gradient_rows=4,
        oversubscribe=True,
    )


# -- trainings


def test_a_run_has_one_sample_per_seed_of_every_format_and_factor(run):
    for metric in ("test_accuracy", "train_loss", "skipped_steps"):
        cases = {(r.case["precision"], r.case["loss_exponent"]): len(r.samples) for r in run.where(metric)}
        assert cases == {(f, e): 2 for f in FORMATS for e in (0, -14)}
    assert {r.case["model"] for r in run.where("gradient_exponent_count")} == {"perceptron", "char_gpt"}


def test_a_seed_fixes_start_and_order_whatever_the_format(data, monkeypatch):
    seen = {}

    def record(name, module, loss, batch, optimizer, scaler):
        start = torch.cat([p.detach().flatten() for p in module.parameters()])
        seen.setdefault(key, []).append((start, batch[1]))

    monkeypatch.setattr(lab.amp, "whole_batch_step", record)
    for key in (("fp32", 0), ("fp16", 0), ("fp32", 1)):
        lab.train(lab.Training(key[0], 0, key[1]), data, CONFIG)

    def same(a, b):
        return all(torch.equal(x, y) for p, q in zip(seen[a], seen[b], strict=True) for x, y in zip(p, q, strict=True))

    assert len(seen["fp32", 0]) == 2 * 1024 // 128
    assert same(("fp32", 0), ("fp16", 0)) and not same(("fp32", 0), ("fp32", 1))


def test_a_factor_costs_only_unscaled_fp16_what_it_has_learnt(data):
    def accuracy(name, exponent):
        return lab.train(lab.Training(name, exponent, 0), data, replace(CONFIG, epochs=4)).test_accuracy

    plain = accuracy("fp32", 0)
    assert plain > 0.5
    for name in ("fp32", "bf16", "fp16"):
        assert accuracy(name, -16) > plain - 0.1, name
    assert accuracy(NO_SCALING, 0) > plain - 0.1
    assert accuracy(NO_SCALING, -16) < plain - 0.2


def test_an_overflow_is_counted_as_a_skipped_step(data):
    config = replace(CONFIG, epochs=1, loss_scale=2.0**24)
    assert lab.train(lab.Training("fp16", 10, 0), data, config).skipped_steps > 0
    assert lab.train(lab.Training("fp16", -14, 0), data, config).skipped_steps == 0
    assert lab.train(lab.Training("fp32", 10, 0), data, config).skipped_steps == 0


# -- gradients


@pytest.mark.parametrize("scale", [2.0**-14, 1.0, 2.0**16])
def test_the_closed_form_is_what_a_cast_to_fp16_does(scale):
    draw = torch.Generator().manual_seed(0)
    g = torch.randn(50_000, generator=draw) * 2.0 ** torch.randint(-55, -10, (50_000,), generator=draw)
    g[:5000] = 0
    found = ((g * scale).half() == 0).double().mean().item()
    predicted = lab.predict(sizes.exponent_counts(g), 5000, scale)
    assert 0.1 <= predicted < 1 and predicted == pytest.approx(found, abs=1e-4)


def test_shares_follow_the_limits_of_fp16():
    g = torch.tensor([0.0, 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 1.0, 65504.0, -65505.0], dtype=torch.float64)
    assert sizes.fp16_shares(g) == {
        "zero_share": 1 / 8,
        "below_subnormal_share": 1 / 8,
        "below_normal_share": 3 / 8,
        "above_largest_share": 1 / 8,
    }


def test_gradients_are_those_of_all_parameters_and_of_every_layers_output():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    workload = Workload(module, lambda b: (torch.randn(b, 3), torch.randint(2, (b,))), nn.functional.cross_entropy)
    batch = workload.make_batch(5)
    found = sizes.gradients(workload, batch, "fp32", 8.0)
    workload.loss(module(batch[0]), batch[1]).mul(8).backward()  # on top of what is there
    doubled = torch.cat([p.grad.flatten() for p in module.parameters()])
    assert torch.allclose(2 * found["parameters"].float(), doubled)
    assert len(found["activations"]) == 5 * (4 + 4 + 2)
    assert not module[0]._forward_hooks


def test_the_histogram_moves_by_the_scale_and_predicts_what_fp16_loses(run):
    for of in ("parameters", "activations"):
        case = {"model": "char_gpt", "of": of}
        before, after = (run.one("gradient_exponent_count", scale=s, **case).samples for s in (1.0, 65536.0))
        assert sum(before) == sum(after) > 1e5
        assert after[20:60] == before[4:44]  # 65536 is 2^16
        lost = {s: run.one("zero_share", precision="fp16", scale=s, **case).value for s in (1.0, 65536.0)}
        assert lost[65536.0] < lost[1.0] / 2
    for scale in (1.0, 65536.0):  # activations: most are FP16 tensors, and none is a sum of lost ones
        expected = run.one("expected_zero_share", model="char_gpt", of="activations", scale=scale)
        found = run.one("zero_share", precision="fp16", model="char_gpt", of="activations", scale=scale).value
        assert expected.kind == "modelled" and expected.value == pytest.approx(found, abs=0.02)
    case = {"model": "perceptron", "of": "activations", "precision": "fp16"}
    small, scaled = (run.one("zero_share", scale=2.0**-14 * s, **case).value for s in (1.0, 65536.0))
    assert small > 0.8 and scaled < 0.4


# -- what the records say


def records(**accuracies):
    return Records(
        Record("amp_training", "test_accuracy", "1", a, case={"precision": p.replace("_", ", "), "loss_exponent": 0})
        for p, a in accuracies.items()
    )


BASE = [0.80, 0.84, 0.82, 0.86, 0.88, 0.81, 0.83, 0.85]
NOISE = [0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.0, 0.0]


def test_formats_are_compared_seed_by_seed():
    found = records(
        fp32=BASE,
        bf16=[a + n for a, n in zip(BASE, NOISE, strict=True)],
        fp16=[a - 0.01 + n for a, n in zip(BASE, NOISE, strict=True)],
    )
    changes = lab.against_fp32(found)
    assert set(changes) == {("bf16", 0), ("fp16", 0)}
    assert not differs(changes["bf16", 0], 0.0) and differs(changes["fp16", 0], 0.0)
    assert changes["fp16", 0].value == pytest.approx(-0.01)  # BASE itself spreads by 0.08
    assert lab.seed_spread(found) == pytest.approx(0.08)
    assert lab.accuracy(found)["fp32", 0].value == pytest.approx(0.835)
    same, worse = lab.verdicts(found)
    assert same == "bf16, loss x 2^0: not distinguishable from FP32: +0.0 points of accuracy [-0.2, +0.2]"
    assert worse.startswith("fp16, loss x 2^0: -1.0 points of accuracy [-1.2, ")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"formats": ("fp8",)}, "formats may hold fp32; .* not fp8"),
        ({"loss_scale": 1000.0}, "power of two"),
        ({"samples": 8200}, "multiple of batch"),
        ({"gradient_models": ("nope",)}, "there is no model 'nope'"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("amp_training", **values)
    assert "\n" not in str(e.value)


def test_a_budget_ends_after_whole_seeds_and_says_what_was_left_out():
    small = {
        "samples": 512,
        "batch": 128,
        "epochs": 1,
        "formats": ("fp32",),
        "gradient_models": (),
        "gradient_steps": 1,
    }
    short, long = (launch("amp_training", 2, seconds=s, oversubscribe=True, **small) for s in (0.001, 1.0))
    assert short.one("left_out").case["loss_exponent"] == -12 and not len(
        short.where("test_accuracy", loss_exponent=-12)
    )
    assert {len(r.samples) for r in short.where("test_accuracy")} == {6}
    [n] = {len(r.samples) for r in long.where("test_accuracy", loss_exponent=0)}
    assert 6 <= n <= lab.MOST_SEEDS and n % 2 == 0
