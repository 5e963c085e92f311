"""What the trace sees: products lowered, losses kept, the rest following."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from labs import autocast_ops as lab
from labs.autocast_ops import autocast_rules
from labs.common.memory import saved_tensors
from labs.kit.errors import BadInput
from labs.kit.launch import launch


@pytest.fixture(scope="module")
def run():
    return launch("autocast_ops", nproc=1)


def treatments(run, model, precision):
    return {row["op"]: row["treatment"] for row in lab.table(run, model, precision)}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_are_lowered_and_the_loss_is_kept(run, precision):
    seen = treatments(run, "cnn_batchnorm", precision)
    assert {op for op, t in seen.items() if t == lab.LOWERED} == {"convolution", "addmm"}
    assert seen["_log_softmax"] == lab.KEPT
    assert seen["relu"] == seen["mean"] == lab.FOLLOWS
    rows = {row["op"]: row for row in lab.table(run, "cnn_batchnorm", precision)}
    assert (rows["convolution"]["dtype_in"], rows["convolution"]["dtype_out"]) == (precision, precision)
    assert rows["_log_softmax"]["dtype_in"] == rows["_log_softmax"]["dtype_out"] == "fp32"


def test_calls_by_hand(run):
    rows = {(r["op"], r["dtype_in"]): r["calls"] for r in lab.table(run, "mlp", "bf16")}
    # three layers with weight and bias each, and the input; the last layer's output goes back up for the loss
    assert rows["addmm", "bf16"] == 3
    assert rows[lab.CAST, "fp32"] == 7
    assert rows[lab.CAST, "bf16"] == 1


def test_a_product_outside_autocast_is_not_lowered():
    x, weight = torch.ones(8, 8), torch.ones(8, 8)
    with lab.Trace() as trace:
        with torch.autocast("cpu", torch.bfloat16):
            x @ weight
        x @ weight
    assert {c.dtype_in: c.treatment for c in trace.calls if c.op == "mm"} == {"bf16": lab.LOWERED, "fp32": lab.FOLLOWS}


def test_a_cast_is_followed_through_views():
    layer = nn.Linear(4, 4, bias=False)
    with lab.Trace() as trace, torch.autocast("cpu", torch.bfloat16):
        layer(layer(torch.ones(2, 4)))  # the second input is 16 bits already: only the weight's transpose was cast
    assert {c.treatment for c in trace.calls if c.op == "mm"} == {lab.LOWERED}


def test_a_format_that_the_device_lacks_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(lab, "supported", lambda name, device: name != "bf16")
    rank = SimpleNamespace(
        device=torch.device("cpu"), progress=lambda *_: None, record=lambda metric, unit, samples, kind="", **case: case
    )
    cases = list(lab.run(lab.Config(models=("mlp",)), rank))
    assert {case["precision"] for case in cases if "precision" in case} == {"fp32", "fp16"}
    assert "bf16 is left out" in capsys.readouterr().out


# -- the rules


MACROS = [
    ("LOWER_PRECISION_FP", autocast_rules.LOWERED),
    ("FP32", autocast_rules.RAISED),
    ("FP32_SET_OPT_DTYPE", autocast_rules.RAISED),
]


@pytest.mark.parametrize(("macro", "rule"), MACROS)
def test_the_rules_for_cuda_are_those_of_torchs_own_header(macro, rule):
    """torch ships the lists that all devices but the CPU share; what the dispatcher does must agree with them."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this torch has no headers")
    body = header.read_text().split(f"#define AT_FORALL_{macro}(_)")[1].split("\n\n")[0]
    listed = set(re.findall(r"_\((\w+)", body))
    found = {op for op, by_device in autocast_rules.rules().items() if by_device["cuda"] == rule}
    assert listed & set(autocast_rules.CALLS) <= found


def test_the_rules_of_a_cpu_are_those_of_real_tensors_on_it():
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.float16):
        assert (
            torch.softmax(x.half(), -1).dtype == torch.float16
            and nn.functional.mse_loss(x.half(), x.half()).dtype == x.dtype
        )
        assert (x @ x.T).dtype == torch.float16
    rules = {op: by_device["cpu"] for op, by_device in autocast_rules.rules().items()}
    assert rules["softmax"] == autocast_rules.FOLLOWS and rules["mse_loss"] == autocast_rules.RAISED
    assert rules["matmul"] == autocast_rules.LOWERED


def test_layer_norm_and_the_loss_have_rules_although_the_trace_saw_no_cast(run):
    seen = treatments(run, "char_gpt", "bf16")
    attention = next(op for op in seen if op.startswith("_scaled_dot_product"))
    assert seen["native_layer_norm"] == seen["nll_loss_forward"] == seen[attention] == lab.FOLLOWS
    assert (
        lab.rule_of(run, "native_layer_norm", "cuda")
        == lab.rule_of(run, "nll_loss_forward", "cpu")
        == autocast_rules.RAISED
    )
    assert lab.rule_of(run, attention, "cpu") == autocast_rules.LOWERED
    assert lab.rule_of(run, "something_else", "cpu") == "?"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"models": ("mlp", "mlp")}, "each model once"),
        ({"precisions": ()}, "at least one of bf16, fp16"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("autocast_ops", **values)
    assert "\n" not in str(e.value)


def test_the_rules_that_memory_is_traced_by_are_those_that_torch_says():
    for op, by_device in autocast_rules.rules().items():
        listed = {autocast_rules.LOWERED: saved_tensors.LOWERED, autocast_rules.RAISED: saved_tensors.RAISED}
        for rule, names in listed.items():
            assert (op in names) == (by_device["cuda"] == rule), op
