"""The mixed-precision step trains as FP32 does, in every format, and each order that is wrong is seen."""

import copy

import pytest
import torch
from torch import nn

from labs.common import models
from labs.common.precision import amp

CPU = torch.device("cpu")
STEPS = 20
# Relative difference of the parameters' change after 20 steps: a few units of the format's 11 or 8 significant bits.
TOLERANCE = {"fp16": 0.003, "fp16, no scaling": 0.003, "bf16": 0.03}


def workload():
    """Smooth, so that rounding does not switch units on or off."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def make_batch(rows):
        x = torch.randn(rows, 16)
        return x, x[:, :4].argmax(1)

    return models.Workload(module, make_batch, nn.functional.cross_entropy)


def micro_batches(found, sizes=(6, 2)):
    torch.manual_seed(1)
    return [[found.make_batch(rows) for rows in sizes] for _ in range(STEPS)]


def trained(found, data, name, step=amp.train_step, max_norm=0.5, **settings):
    """Change of all parameters, flat, and the last loss."""
    module = copy.deepcopy(found.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    scaler = amp.scaler(name, CPU, **settings)
    for batches in data:
        loss = step(module, found.loss, batches, optimizer, name, scaler, max_norm)
    pairs = zip(module.parameters(), found.module.parameters(), strict=True)
    return torch.cat([(a - b).detach().flatten() for a, b in pairs]), loss


def reference(found, data, max_norm=0.5):
    """Written out in FP32: whole batches, no accumulation, no scaler."""
    module = copy.deepcopy(found.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for batches in data:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = found.loss(module(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    pairs = zip(module.parameters(), found.module.parameters(), strict=True)
    return torch.cat([(a - b).detach().flatten() for a, b in pairs]), loss.detach()


def off(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.fixture(scope="module")
def case():
    found = workload()
    data = micro_batches(found)
    return found, data, *reference(found, data)


@pytest.mark.parametrize("name", amp.FORMATS)
def test_after_20_steps_parameters_agree_with_fp32(case, name):
    found, data, wanted, loss = case
    change, last = trained(found, data, name)
    assert off(change, wanted) < TOLERANCE.get(name, 1e-5)
    assert last.item() == pytest.approx(loss.item(), rel=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize("name", amp.FORMATS)
def test_the_steps_that_are_shown_are_the_general_one_without_clipping(name):
    found = workload()
    data = micro_batches(found, sizes=(8,))
    general, _ = trained(found, data, name, max_norm=None)

    def shown(module, loss, batches, optimizer, name, scaler, max_norm):
        return amp.whole_batch_step(name, module, loss, batches[0], optimizer, scaler)

    assert torch.equal(trained(found, data, name, step=shown)[0], general)


def without_zero_grad(module, loss, micro_batches, optimizer, *rest):
    zero_grad, optimizer.zero_grad = optimizer.zero_grad, lambda: None
    try:
        return amp.train_step(module, loss, micro_batches, optimizer, *rest)
    finally:
        optimizer.zero_grad = zero_grad


def test_loss_scaling_hides_a_missing_zero_grad(case):
    """What is left of the last gradient is not scaled, so that unscaling divides it by 65536: it is lost."""
    found, data, wanted, _ = case
    change, _ = trained(found, data, "fp16", without_zero_grad)
    assert off(change, wanted) < TOLERANCE["fp16"]
    change, _ = trained(found, data, "fp16", without_zero_grad, init_scale=1.0)
    assert off(change, wanted) > 10 * TOLERANCE["fp16"]


def test_unequal_micro_batches_count_by_rows(case):
    found, data, wanted, _ = case
    change, _ = trained(found, micro_batches(found, (8,)), "fp32", max_norm=None)
    assert off(change, wanted) > 0.1  # other data, other result: the measure is no constant
    whole = [[tuple(torch.cat(p) for p in zip(*b, strict=True))] for b in data]
    assert off(trained(found, whole, "fp32")[0], wanted) < 1e-5


def test_an_overflow_skips_the_step_and_halves_the_scale(case):
    found, data, _, _ = case
    module = copy.deepcopy(found.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    scaler = amp.scaler("fp16", CPU)
    before = [p.detach().clone() for p in module.parameters()]
    amp.train_step(module, lambda o, y: found.loss(o, y) * 1e38, data[0], optimizer, "fp16", scaler, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert scaler.get_scale() == 32768.0
    amp.train_step(module, found.loss, data[0], optimizer, "fp16", scaler, 0.5)
    assert not torch.equal(before[0], next(module.parameters())) and scaler.get_scale() == 32768.0


def test_backward_runs_outside_of_autocast_and_forward_inside(case):
    found, data, _, _ = case
    seen = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen["forward"] = torch.is_autocast_enabled("cpu")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen["backward"] = torch.is_autocast_enabled("cpu")
            return g

    module = copy.deepcopy(found.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    loss = lambda o, y: found.loss(Spy.apply(o), y)  # noqa: E731
    amp.train_step(module, loss, data[0], optimizer, "bf16", amp.scaler("bf16", CPU))
    assert seen == {"forward": True, "backward": False}
    assert {p.dtype for p in module.parameters()} == {p.grad.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tf32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_products_run_in_the_format(name, dtype):
    with amp.precision(name, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert not torch.is_autocast_enabled("cpu")


def test_an_unknown_format_is_refused_in_one_line():
    with pytest.raises(ValueError, match="there is no format 'fp8': take one of fp32, tf32"), amp.precision("fp8", CPU):
        pass
