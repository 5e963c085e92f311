"""The experiments of notebook 04: what they count, and what they make of a record."""

import functools
import math

import pytest
import torch

from labs import amp_memory, amp_training, autocast_ops, loss_scaling, mixed_precision
from labs.common import oracle
from labs.common.models.large_models import bert, tiny_bert
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.notebook import recorded
from labs.kit.record import Record, Records

LABS = [amp_memory, amp_training, autocast_ops, loss_scaling, mixed_precision]


@pytest.fixture(scope="module")
def smoke():
    names = [lab.__name__.removeprefix("labs.") for lab in LABS]
    return {name: launch(name, 1 + (name == "amp_training"), smoke=True, oversubscribe=True) for name in names}


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.__name__)
def test_an_answer_follows_from_a_smoke_run(smoke, lab):
    run = smoke[lab.__name__.removeprefix("labs.")]
    assert all(sentence.endswith(".") for sentence in lab.answer(run))
    if hasattr(lab, "category"):
        assert isinstance(lab.category(run), str)


def test_a_gradient_is_counted_where_its_size_is():
    g = torch.tensor([0.0, 2.0**-24, -(2.0**-24) * 1.5, 1.0, 2.0**-70, 2.0**20])
    counts = amp_training.exponent_counts(g.double())
    assert counts[-24 - amp_training.LOWEST] == 2 and counts[-amp_training.LOWEST] == 1
    assert counts[0] == counts[-1] == 1 and sum(counts) == 5, "zeros don't count, what is beyond does"


def test_a_scaled_gradient_is_divided_again(smoke):
    errors = amp_training.errors(smoke["amp_training"])
    assert all(error < 0.05 for error in errors.values())
    assert errors[512, amp_training.SCALED] < errors[512, amp_training.BF16]


def gradient_records(plain, apart):
    return Records(
        [
            Record("amp_training", "gradient_error", "1", [e], case={"tokens": 512, "way": way})
            for way, e in ((amp_training.UNSCALED, plain), (amp_training.SCALED, 0.001), (amp_training.BF16, 0.01))
        ]
        + [
            Record("amp_training", "held_out_loss", "nats", [3.0 + d, 3.1 + d], case={"way": way})
            for way, d in (("FP32", 0.0), (amp_training.UNSCALED, apart))
        ]
    )


@pytest.mark.parametrize(
    ("plain", "apart", "category"),
    [
        (0.07, 0.001, "worse, the short runs show nothing"),
        (0.002, 0.001, "as good, the short runs show nothing"),
        (0.07, 0.5, "worse, the short runs show it"),
    ],
)
def test_the_round_decides(plain, apart, category):
    assert amp_training.category(gradient_records(plain, apart)) == category


def test_each_mistake_leaves_its_sign(smoke):
    run = smoke["loss_scaling"]
    signs = {(r.case["case"], r.case["sign"]): r.value for r in run.where("count")}
    assert loss_scaling.category(run) == "only the right one trains as FP32"
    assert signs["right", "norm that clipping saw, FP32 = 1"] == pytest.approx(1, abs=0.01)
    assert signs["clip before unscale_", "norm that clipping saw, FP32 = 1"] > 1000
    assert signs["unscale_ per micro-batch", "norm that clipping saw, FP32 = 1"] < 0.9
    for case in ("new scaler every step", "no zero_grad"):
        assert signs[case, "steps taken"] == 0
    assert signs["new scaler every step", "scale at the end"] == loss_scaling.Config().init_scale
    assert signs["no zero_grad", "scale at the end"] < 2.0**6
    assert signs["scheduler always", "learning rate at the end"] == 0 < signs["right", "learning rate at the end"]
    assert signs["optimizer.step", "distance moved, FP32 = 1"] == 1e9


def test_the_scale_halves_after_a_skipped_step_and_doubles_after_six_good_ones(smoke):
    run, good = smoke["loss_scaling"], 0
    scale, skipped = (run.one(metric, case="right").samples for metric in ("scale", "skipped"))
    for now, then, was_skipped in zip(scale, scale[1:], skipped, strict=False):
        good = 0 if was_skipped else good + 1
        assert then == now * (0.5 if was_skipped else 2.0 if good == 6 else 1.0)
        good %= 6


KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
HAS_KEY = {
    "linear": "linear",
    "conv2d": "conv2d",
    "softmax": "softmax.int",
    "log_softmax": "log_softmax.int",
    "log_softmax inside cross_entropy": "cross_entropy_loss",
    "layer_norm": "layer_norm",
    "sum": "sum",
    "exp": "exp",
    "gelu": "gelu",
    "add": "add.Tensor",
    "mse_loss": "mse_loss",
    "binary_cross_entropy": "binary_cross_entropy",
}


def test_an_operation_follows_its_input_where_the_dispatcher_has_no_kernel_for_autocast(smoke):
    """torch's own table says whether there is a rule; the lab finds it, and which one, by running the operation."""
    rules = {(r.case["op"], r.case["device"]): r.case["runs_in"] for r in smoke["autocast_ops"].where("rule")}
    for op, name in HAS_KEY.items():
        for device, key in KEYS.items():
            has_rule = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            assert has_rule == (rules[op, device] != autocast_ops.FOLLOWS), (op, device)
    assert rules["binary_cross_entropy", "cuda"] == autocast_ops.REFUSED
    assert rules["cross_entropy", "cuda"] == rules["log_softmax inside cross_entropy", "cpu"] == autocast_ops.RAISED


def test_the_peak_is_that_of_the_oracle(smoke):
    """Notebooks 04 and 05 ask the same function about the same model."""
    for (name, rows), size in amp_memory.peaks(smoke["amp_memory"]).items():
        assert size == oracle.step(tiny_bert, rows, optimizer="adam", precision=name, target="cuda").peak_bytes
    whole = launch("amp_memory", 1, formats=("fp32",), batches=(10,), oversubscribe=True)
    trace = oracle.step(functools.partial(bert, seq=512), 10, optimizer="adam", precision="fp32", target="cuda")
    assert amp_memory.peaks(whole) == {("fp32", 10): trace.peak_bytes}


def test_the_peak_agrees_with_what_the_h200_allocated():
    run = recorded("memory_oracle")
    same = {"model": "bert_large", "policy": "none", "set_to_none": True, "batch": 16}
    traced = oracle.step(bert, 16, optimizer="adam", target="cuda").peak_bytes
    assert traced == sum(r.value for r in run.where("peak_bytes", **same))
    assert math.isclose(traced, run.one("allocated_bytes", **same).value, rel_tol=0.01)


def test_the_recorded_gpu_lost_with_small_models_and_won_with_large_products():
    run = recorded("mixed_precision")
    speeds = mixed_precision.speedups(run)
    assert {model for model, _ in speeds} == {"cnn", "char_gpt", "char_gpt_eager", "mlp"}
    assert all(s.high < 1 for (_, name), s in speeds.items() if name in ("bf16", "fp16"))
    assert mixed_precision.category(run) == "slower"
    products = mixed_precision.product_speedups(run, "bf16", casts=True)
    assert products[512].high < 1 < products[1024].low < products[8192].low


def test_formats_are_those_of_the_device():
    values = {"smoke": True, "models": ("mlp",), "device": "cpu", "oversubscribe": True}
    run = launch("mixed_precision", 1, formats=("bf16",), **values)
    assert {r.case["precision"] for r in run.where("step_s")} == {"fp32", "bf16"}
    with pytest.raises(BadInput, match="does not support tf32"):
        launch("mixed_precision", 1, formats=("tf32",), **values)


@pytest.mark.parametrize(
    ("lab", "values", "words"),
    [
        ("amp_training", {"rows": (8, 0)}, "rows must hold positive numbers"),
        ("loss_scaling", {"cases": ("no zero_grad",)}, "cases must start with right"),
        ("amp_memory", {"batches": (0,)}, "batches must hold positive numbers"),
        ("mixed_precision", {"models": ()}, "models must name"),
    ],
)
def test_bad_input_is_refused(lab, values, words):
    with pytest.raises(BadInput, match=words):
        launch(lab, 1, **values)
