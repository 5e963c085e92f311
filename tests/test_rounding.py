"""The yardstick for "equal up to rounding": it follows the format and the model, and lets no mistake pass."""

import pytest
import torch
from torch import nn

from labs.common.precision import rounding
from labs.kit.record import Record, Records


def one_layer(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(dtype)
    return module, nn.functional.mse_loss, torch.randn(256, 64, dtype=dtype), torch.randn(256, 1, dtype=dtype)


def test_it_is_of_the_size_of_the_formats_spacing_and_leaves_the_module_alone():
    module, loss, x, y = one_layer(torch.float32)
    before = [p.clone() for p in module.parameters()]
    found = rounding.rounding_error(module, loss, x, y)
    assert 2**-26 < found < 2**-19, "FP32 rounds to 2^-24"
    assert all(p.grad is None and p.dtype == torch.float32 for p in module.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert rounding.rounding_error(*one_layer(torch.float64)) == 0.0


def records(error, floor, **case):
    made = [Record("a_lab", "gradient_relative_error", "1", [error], case={"way": "ddp", **case})]
    return Records([*made, Record("a_lab", rounding.METRIC, "1", [floor], case=case)])


def test_what_lies_beyond_it_is_found():
    for error, wrong in ((0.0, 0), (15e-7, 0), (17e-7, 1)):
        assert len(rounding.beyond(records(error, 1e-7))) == wrong


def test_each_model_has_its_own():
    both = records(1e-4, 1e-5, model="with Winograd's convolutions") + records(1e-4, 1e-7, model="sums")
    assert [r.case["model"] for r in rounding.beyond(both)] == ["sums"]


def test_an_error_without_a_yardstick_is_not_judged():
    b = records(1e-7, 1e-7, model="b").where("gradient_relative_error")
    with pytest.raises(ValueError, match="no rounding_relative_error of model b"):
        rounding.beyond(records(1e-7, 1e-7, model="a") + b)
