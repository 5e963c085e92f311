"""The scaler follows its rule through a planted overflow; the right order is as FP32; each wrong one shows itself."""

import math

import pytest
import torch

from labs import loss_scaling as lab
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.loss_scaling.loss_scaling_trial import SPIKE

STOPS, LOSES = "stops with an error", "loses steps"
OUTCOMES = {
    "right": "as FP32",
    "no zero_grad": "as FP32",
    "no zero_grad, overflow": LOSES,
    "no zero_grad, bf16": "wrong",
    "clip before unscale_": "wrong",
    "optimizer.step": "as FP32",
    "optimizer.step, overflow": "not finite",
    "optimizer.step, not unscaled": "wrong",
    "optimizer.step, not unscaled or clipped": "not finite",
    "unscale_ and update every micro-batch": "wrong",
    "unscale_ twice": STOPS,
    "loss not divided": "wrong",
    "scaler, no autocast": "as FP32",
    "autocast, no scaler": "as FP32",
    "bf16": "as FP32",
    "right, overflow": "as FP32",
    "scheduler always, overflow": "wrong",
    "right, scale too large": LOSES,
    "new scaler every step, scale too large": LOSES,
}
ADAM_HIDES = {"optimizer.step, not unscaled or clipped": "wrong"}  # the scale is divided away: finite, yet wrong


@pytest.fixture(scope="module")
def run():
    return launch("loss_scaling", nproc=1)


def value(run, metric, order, optimizer="sgd"):
    return run.one(metric, order=order, optimizer=optimizer).value


@pytest.mark.parametrize(
    ("overflows", "scales"),
    [
        ([0, 0, 0, 0, 0], [8, 8, 8, 16, 16, 16]),
        ([0, 0, 1, 0, 0, 0], [8, 8, 8, 4, 4, 4, 8]),  # the overflow starts the count anew
        ([1, 1, 0], [8, 4, 2, 2]),
        ([], [8]),
    ],
)
def test_rule_of_the_scale_by_hand(overflows, scales):
    assert lab.predict(overflows, 8.0, growth_interval=3) == scales


def test_rule_of_the_scale_is_torchs():
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    overflows, seen = [0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0], []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale((weight * (math.inf if overflow else 1.0)).sum()).backward()
        seen.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert [*seen, scaler.get_scale()] == lab.predict(overflows, 64.0, growth_interval=2)


def test_the_planted_overflow_halves_the_scale_once_and_skips_one_step(run):
    trace = {m: run.one(m, trace="planted overflow") for m in ("scale", "found_inf", "skipped", "predicted_scale")}
    planted, scale = trace["skipped"].case["overflow_step"], trace["scale"].samples
    only = tuple(float(i == planted) for i in range(len(scale)))
    assert trace["skipped"].samples == trace["found_inf"].samples == only
    falls = [i for i in range(1, len(scale)) if scale[i] < scale[i - 1]]
    assert falls == [planted + 1]
    assert scale[planted + 1] == scale[planted] / 2
    interval = trace["scale"].case["growth_interval"]
    grown = [i for i in range(1, len(scale)) if scale[i] > scale[i - 1]]
    assert grown == [interval, planted + 1 + interval]
    assert scale == trace["predicted_scale"].samples


def test_too_large_a_start_comes_down_by_skipping(run):
    scale, skipped = (run.one(m, trace="too large a start").samples for m in ("scale", "skipped"))
    first = skipped.index(0.0)
    assert first >= 3
    assert list(scale[: first + 1]) == [scale[0] / 2**i for i in range(first + 1)]
    assert scale == run.one("predicted_scale", trace="too large a start").samples


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_order_does_what_is_said_of_it(run, optimizer):
    rows = {row["order"]: row["outcome"] for row in lab.outcomes(run, optimizer)}
    assert rows == OUTCOMES | (ADAM_HIDES if optimizer == "adamw" else {})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_right_order_is_rounding_away_from_fp32(run, optimizer):
    for order in ("right", "right, overflow", "bf16"):
        tolerance = lab.TOLERANCE[optimizer] * lab.ROUNDING["bf16" if order == "bf16" else "fp16"]
        assert 0 < value(run, "parameter_error", order, optimizer) <= tolerance, order


def test_clipping_before_unscaling_stops_sgd_but_not_adam(run):
    scale = value(run, "last_scale", "clip before unscale_")
    seen, true = (run.one("clip_norm", order=o, optimizer="sgd").samples[0] for o in ("clip before unscale_", "right"))
    assert seen == pytest.approx(scale * true, rel=1e-2)
    assert value(run, "update_ratio", "clip before unscale_") < 10 / scale
    assert value(run, "update_ratio", "clip before unscale_", "adamw") > 0.5


def test_clipping_is_at_work_in_the_right_order(run):
    norms = run.one("clip_norm", order="right", optimizer="sgd").samples
    assert min(norms) < lab.Config().max_norm < max(norms)


def test_an_overflow_without_zero_grad_is_never_left(run):
    order = "no zero_grad, overflow"
    planted = run.one("parameter_error", order=order, optimizer="sgd").config["overflow_step"]
    assert value(run, "optimizer_steps", order) == planted
    steps = lab.Config().steps - planted
    assert value(run, "last_scale", order) == lab.DEFAULT_SCALE / 2**steps


def test_the_spike_overflows_fp16_only():
    assert torch.isinf(torch.tensor(SPIKE * lab.DEFAULT_SCALE).half())
    assert torch.isfinite(torch.tensor(SPIKE * lab.DEFAULT_SCALE * 1e6))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"orders": ("wrong",)}, "there is no order 'wrong'"),
        ({"accumulate": 1}, "1 is no accumulation"),
        ({"overflow_step": 20}, "one of the 20 steps"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("loss_scaling", **values)
    assert "\n" not in str(e.value)
