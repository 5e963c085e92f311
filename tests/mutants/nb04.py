"""Typical mistakes in notebook 04: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math

import torch
from torch.nn.utils import clip_grad_norm_

FP16 = torch.float16


def _autocast(dtype=FP16):
    return torch.amp.autocast("cpu", dtype=dtype)


def _step(*, context=_autocast, zero_inside=False, divide=lambda n: n, backward_inside=False, scaled=True,
          clip_first=False):  # fmt: skip
    """The right step, except for what a keyword says."""

    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        optimizer.zero_grad()
        for x, y in micro_batches:
            if zero_inside:
                optimizer.zero_grad()
            with context():
                loss = loss_fn(model(x), y) / divide(len(micro_batches))
                if backward_inside:
                    scaler.scale(loss).backward()
            if not backward_inside:
                (scaler.scale(loss) if scaled else loss).backward()
        if clip_first:
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.unscale_(optimizer)
        if not clip_first:
            clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()

    return train_step


def _as_in_the_article(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    for x, y in micro_batches:
        with torch.cuda.amp.autocast():
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _update_only_if_finite(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    for x, y in micro_batches:
        with _autocast():
            loss = loss_fn(model(x), y) / len(micro_batches)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if torch.isfinite(clip_grad_norm_(model.parameters(), max_norm)):
        scaler.step(optimizer)
        scaler.update()


def _flat(gradients):
    return torch.cat([g.flatten() for g in gradients])


def _nonzero(gradients):
    return _flat(gradients)[_flat(gradients) != 0]


def _share(gradients):
    return (_nonzero(gradients).half() == 0).float().mean().item()


def _power(ratio, rounded=math.floor):
    return 2.0 ** rounded(math.log2(ratio))


def _scale(gradients):
    return _power(65504 / _flat(gradients).abs().max().item())


def _share_slip(share):
    return lambda gradients: (float(share(gradients)), _scale(gradients))


def _scale_slip(scale):
    return lambda gradients: (_share(gradients), float(scale(gradients)))


MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


def _memory(fp32, amp, answer=lambda a, b: 1 - a / b):
    """Bytes per parameter without the moments' 4, and shares of activations, from functions of (moments, lowered)."""

    def saved(parameters, activation_bytes, lowered_share, optimizer):
        m = MOMENTS[optimizer]
        full, less = (per(m) * parameters + act(lowered_share) * activation_bytes for per, act in (fp32, amp))
        return answer(less, full)

    return saved


FULL = (lambda m: 8 + 4 * m, lambda low: 1)
LESS = (lambda m: 10 + 4 * m, lambda low: 1 - low / 2)


def _amp(per=LESS[0], act=LESS[1]):
    return _memory(FULL, (per, act))


def _as(answer):
    return _memory(FULL, LESS, answer)


def _both(per):
    return _memory((per, FULL[1]), (lambda m: per(m) + 2, LESS[1]))


def _round(rounding=round, bias=lambda e: 2 ** (e - 1) - 1, lowest=lambda b: 1 - b, bits=lambda m: m,
           finish=lambda y, x, b, m: y if y < 2.0 ** (b + 1) else math.inf, log=math.floor):  # fmt: skip
    def rounded(x, exponent_bits, mantissa_bits):
        b = bias(exponent_bits)
        exponent = max(log(math.log2(x)), lowest(b))
        spacing = 2.0 ** (exponent - bits(mantissa_bits))
        return finish(rounding(x / spacing) * spacing, x, b, mantissa_bits)

    return rounded


def _top(b, m):
    return 2.0**b * (2 - 2.0**-m)


def _ends(y, b):
    return y if y < 2.0 ** (b + 1) else math.inf


MUTANTS = {
    "04.1": {
        "as in the article": (_as_in_the_article, "torch.cuda.amp.autocast is deprecated"),
        "bfloat16": (_step(context=lambda: _autocast(None)), "the forward pass ran in bfloat16"),
        "backward inside autocast": (_step(backward_inside=True), "backward() ran inside autocast"),
        "zero_grad in the loop": (_step(zero_inside=True), "zeroed between two micro-batches"),
        "not scaled": (_step(scaled=False), "scaler.scale() was never called"),
        "loss not divided": (_step(divide=lambda n: 1), "were added, not averaged: the gradient is 3 times too large"),
        "clip before unscale_": (_step(clip_first=True), "because unscale_() came after clipping"),
        "update only if finite": (_update_only_if_finite, "a gradient was inf, and scaler.update() was not called"),
    },
    "04.2": {
        "zeros count as lost": (_share_slip(lambda g: (_flat(g).half() == 0).float().mean()), "you count exact zeros"),
        "smallest normal number": (
            _share_slip(lambda g: (_nonzero(g).abs() < torch.finfo(FP16).tiny).float().mean()),
            "below 2^-14",
        ),
        "mean of the shares": (
            _share_slip(lambda g: sum(_share([t]) for t in g) / len(g)),
            "you average the tensors' shares",
        ),
        "after scaling": (
            _share_slip(lambda g: (((_nonzero(g) * _scale(g)).half()) == 0).float().mean()),
            "lost with your scale",
        ),
        "next larger power": (
            _scale_slip(lambda g: _power(65504 / _flat(g).abs().max().item(), math.ceil)),
            "the next larger power",
        ),
        "2^16 for 65504": (_scale_slip(lambda g: _power(65536 / _flat(g).abs().max().item())), "FP16 ends at 65504"),
        "no abs": (_scale_slip(lambda g: _power(65504 / _flat(g).max().item())), "positive elements only"),
        "never below 1": (_scale_slip(lambda g: max(1, _scale(g))), "never below 1"),
    },
    "04.3": {
        "everything halves": (lambda p, a, low, opt: 0.5, "everything halve"),
        "parameters and gradients halve": (_amp(per=lambda m: 4 + 4 * m), "parameters and gradients"),
        "no copies": (_amp(per=lambda m: 8 + 4 * m), "2 bytes per parameter too few"),
        "16 bytes always": (_both(lambda m: 16), "16 bytes per parameter for every optimizer"),
        "all activations halve": (_amp(act=lambda low: 0.5), "you halve all activations"),
        "relative to AMP": (_as(lambda a, b: b / a - 1), "by those of the FP32 step"),
        "sign": (_as(lambda a, b: a / b - 1), "the sign is wrong"),
        "never negative": (_as(lambda a, b: max(0, 1 - a / b)), "never let AMP cost memory"),
    },
    "04.4": {
        "truncation": (_round(math.floor), "you cut digits off"),
        "half away from zero": (_round(lambda q: math.floor(q + 0.5)), "you go up, always"),
        "no subnormal numbers": (
            _round(finish=lambda y, x, b, m: 0.0 if y < 2.0 ** (1 - b) else _ends(y, b)),
            "no subnormal numbers",
        ),
        "smallest exponent one too low": (_round(lowest=lambda b: -b), "one too low"),
        "largest exponent not reserved": (
            _round(finish=lambda y, x, b, m: y if y < 2.0 ** (b + 2) else math.inf),
            "your largest exponent",
        ),
        "inf before rounding": (
            _round(finish=lambda y, x, b, m: math.inf if x > _top(b, m) else y),
            "before you round",
        ),
        "leading 1 counted": (_round(bits=lambda m: m - 1), "one digit too few"),
        "always FP16": (lambda x, e, m: _round()(x, 5, 10), "always round to FP16"),
    },
}
