"""Checkers of notebook 04: right answers of another shape pass, and the reference agrees with PyTorch's own formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from labs.chapters.nb04 import solutions as solution
from labs.chapters.nb04.exercise_amp import Job, Watched
from labs.chapters.nb04.exercises import CASES
from labs.kit.check import TODO, examine

# -- 04.1


def accumulate(model, scaler, micro_batches, loss_fn, *, loss_inside=True, divide_last=False):
    for x, y in micro_batches:
        with torch.autocast(x.device.type, torch.float16):
            output = model(x)
            loss = loss_fn(output, y) if loss_inside else None
        loss = loss_fn(output, y) if loss is None else loss
        scaler.scale(loss if divide_last else loss / len(micro_batches)).backward()


def cleared_at_the_end(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    accumulate(model, scaler, micro_batches, loss_fn)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=False)


def divided_at_the_end(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    accumulate(model, scaler, micro_batches, loss_fn, divide_last=True)
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad /= len(micro_batches)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return 0.0


def clipped_by_hand(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    accumulate(model, scaler, micro_batches, loss_fn, loss_inside=False)
    scaler.unscale_(optimizer)
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad *= min(1.0, max_norm / norm.item())
    scaler.step(optimizer)
    scaler.update()


def clipped_to_a_scaled_norm(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    accumulate(model, scaler, micro_batches, loss_fn)
    clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("right", [cleared_at_the_end, divided_at_the_end, clipped_by_hand, clipped_to_a_scaled_norm])
def test_other_steps_that_do_the_same_pass(right):
    assert examine("04.1", right).state == "passed", examine("04.1", right).text


def step_with(device_type=lambda model, x: next(model.parameters()).device.type, new_optimizer=False):
    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        optimizer.zero_grad()
        if new_optimizer:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for x, y in micro_batches:
            with torch.amp.autocast(device_type(model, x), dtype=torch.float16):
                loss = loss_fn(model(x), y) / len(micro_batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return train_step


def test_autocast_for_a_fixed_device_is_told_and_torch_is_left_as_it_was():
    assert 'autocast is for "cpu"' in examine("04.1", step_with(lambda model, x: "cpu")).text
    assert examine("04.1", step_with()).state == "passed"
    assert examine("04.1", step_with(lambda model, x: x.device.type)).state == "passed"
    assert "device" not in vars(torch.Tensor) and torch.ones(1).device.type == "cpu"


def test_an_optimizer_made_anew_in_each_step_is_told():
    assert "another one did" in examine("04.1", step_with(new_optimizer=True)).text


def repaired(*parts):
    """The article's loop with some of its faults removed."""

    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        if "zero" in parts:
            optimizer.zero_grad()
        for x, y in micro_batches:
            with (
                torch.amp.autocast(x.device.type, dtype=torch.float16)
                if "autocast" in parts
                else torch.cuda.amp.autocast()
            ):
                loss = loss_fn(model(x), y) / (len(micro_batches) if "mean" in parts else 1)
            scaler.scale(loss).backward()
            if "once" not in parts:
                finish(model, optimizer, scaler, max_norm)
        if "once" in parts:
            finish(model, optimizer, scaler, max_norm)

    def finish(model, optimizer, scaler, max_norm):
        if "unscale" in parts:
            scaler.unscale_(optimizer)
        if "clip" in parts:
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return train_step


def test_the_article_is_led_from_fault_to_fault():
    parts = ["autocast", "once", "mean", "zero", "clip", "unscale"]
    told = [examine("04.1", repaired(*parts[:n])) for n in range(len(parts) + 1)]
    words = ["deprecated", "a step of its own", "added, not averaged", "second call of train_step the gradients of the",
             "nothing has clipped it", "because only step() unscaled them"]  # fmt: skip
    assert all(w in o.text for w, o in zip(words, told, strict=False)), [o.text for o in told]
    assert told[-1].state == "passed"


def test_the_stub_is_the_article_itself_and_to_do():
    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        TODO  # noqa: B018
        repaired()(model, optimizer, scaler, micro_batches, loss_fn, max_norm)

    assert examine("04.1", train_step).state == "to do"


def test_an_error_of_another_kind_shows_the_learners_line():
    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        with torch.autocast("cpu", torch.float16):
            model(torch.ones(2, 2))

    text = examine("04.1", train_step).text
    assert "shapes cannot be multiplied" in text and "model(torch.ones(2, 2))" in text


def test_the_planted_overflow_halves_the_scale_once_and_changes_no_parameter():
    job = Job(seed=1, micro_batches=2, scale=2.0**12, max_norms=(1.0,) * 3, overflow=1)
    watched = Watched(job.seed, job.scale)
    scales, moved = [], []
    for i in range(3):
        before = watched.parameters()
        assert watched.run(solution.train_step, job.batches(i), 1.0) is None
        scales.append(watched.scaler.get_scale())
        moved.append(not torch.equal(before, watched.parameters()))
    assert scales == [4096, 2048, 2048] and moved == [True, False, True]


# -- 04.2


def test_a_scale_is_the_largest_that_keeps_every_gradient_finite():
    for largest in (1.0, 0.01, 65504.0, 3e5, 2.0**-3 * (1 - 2.0**-13)):
        g = [torch.tensor([largest, -1e-3, 0.0]), torch.tensor([[-largest]])]
        _, scale = solution.loss_scale(g)
        assert torch.tensor(largest * scale).half().isfinite() and torch.tensor(2 * largest * scale).half().isinf()


def test_by_threshold_is_as_good_as_by_conversion():
    def loss_scale(gradients):
        sizes = [abs(x) for t in gradients for x in t.flatten().tolist() if x != 0]
        scale = 1.0
        while max(sizes) * scale > 65504:
            scale /= 2
        while max(sizes) * scale * 2 <= 65504:
            scale *= 2
        return sum(s <= 2**-25 for s in sizes) / len(sizes), torch.tensor(scale)

    assert examine("04.2", loss_scale).state == "passed"


# -- 04.3


def test_bert_large_with_few_and_with_many_activations():
    few, many = (solution.saved_share(3.35e8, a * 1e9, 0.9, "adam") for a in (2, 60))
    assert few < 0.1 < 0.35 < many < 0.5
    assert solution.saved_share(1e9, 0, 1.0, "sgd") == pytest.approx(-2 / 8)


# -- 04.4


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float16, (5, 10)), (torch.bfloat16, (8, 7)), (torch.float8_e5m2, (5, 2)), (torch.float32, (8, 23))],
)
def test_the_reference_rounds_as_pytorch_does(dtype, bits):
    # multiples of 2^-20 in every binade: FP32 holds each exactly, so that PyTorch rounds once
    tiny = 2 - 2 ** (bits[0] - 1) - bits[1]
    draw = torch.Generator().manual_seed(0)
    for exponent in range(max(tiny - 1, -140), 2 ** (bits[0] - 1)):
        for part in (0, 2**19, *torch.randint(2**20, (4,), generator=draw).tolist()):
            x = math.ldexp(1 + part / 2**20, exponent)
            exact = torch.tensor(x, dtype=torch.float32)
            if exact.item() == x:
                assert solution.round_to(x, *bits) == exact.to(dtype).double().item(), (x, bits)


def test_every_rule_has_a_case():
    values = {solution.round_to(*case) for case in CASES if case[1:] == (5, 10)}
    assert {0.0, 2.0**-24, 65504.0, math.inf} <= values
    assert {x for x, *bits in CASES if bits == [5, 10] and 65504 < x < 65536}


def test_decimal_arithmetic_is_as_good():
    def round_to(x, exponent_bits, mantissa_bits):
        bias = (1 << exponent_bits - 1) - 1
        exponent = max(math.frexp(x)[1] - 1, 1 - bias)
        steps = round(math.ldexp(x, mantissa_bits - exponent))
        value = math.ldexp(steps, exponent - mantissa_bits)
        return torch.tensor(value if value <= (2 - 2.0**-mantissa_bits) * 2.0**bias else torch.inf, dtype=torch.float64)

    assert examine("04.4", round_to).state == "passed"
