"""Typical mistakes in notebook 04: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math

import torch
from torch.nn.utils import clip_grad_norm_

FP16 = torch.float16


def epoch(
    *,
    dtype=None,
    device="model",
    move=True,
    inside=False,
    around=False,
    article=False,
    weigh=True,
    clip="after unscale_",
    always=False,
    last=True,
    answer=lambda skipped: skipped,
):
    """A right epoch, except for what a keyword says."""

    def train_epoch(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
        home, skipped, held = next(model.parameters()).device, 0, []
        format_ = dtype or (torch.float16 if scaler.is_enabled() else torch.bfloat16)
        for i, batch in enumerate(batches, 1):
            held.append(batch)
            if len(held) < accumulate and not (last and i == len(batches)):
                continue
            rows = sum(len(x) for x, _ in held)
            optimizer.zero_grad()
            for x, y in held:
                if move:
                    x, y = x.to(home), y.to(home)
                kind = home.type if device == "model" else device
                with torch.cuda.amp.autocast() if article else torch.autocast(kind, format_):
                    loss = loss_fn(model(x), y) * (len(x) / rows if weigh else 1 / len(held))
                    if inside:
                        scaler.scale(loss).backward()
                if not inside:
                    scaler.scale(loss).backward()
            if clip == "before unscale_":
                clip_grad_norm_(model.parameters(), max_norm)
            scaler.unscale_(optimizer)
            if clip == "after unscale_":
                clip_grad_norm_(model.parameters(), max_norm)
            before, held = scaler.get_scale(), []
            optimizer.step() if around else scaler.step(optimizer)
            scaler.update()
            skipped += (fell := scaler.get_scale() < before)
            if always or not fell:
                scheduler.step()
        return answer(skipped)

    return train_epoch


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


def _diagnose(
    *,
    stuck=lambda log: all(row["skipped"] for row in log[-4:]),
    much=500.0,
    constant=lambda log: len({row["scale"] for row in log}) == 1 and any(row["skipped"] for row in log),
):
    """A right diagnosis, except for what a keyword says."""

    def diagnose(log):
        if constant(log):
            return "new scaler every step"
        if stuck(log):
            return "no zero_grad"
        norms = [row["norm"] for row in log if not row["skipped"]]
        return "clip before unscale_" if max(norms) > much else "fine"

    return diagnose


def _round(
    rounding=round,
    bias=lambda e: 2 ** (e - 1) - 1,
    lowest=lambda b: 1 - b,
    bits=lambda m: m,
    finish=lambda y, x, b, m: y if y < 2.0 ** (b + 1) else math.inf,
    log=math.floor,
):
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
        "always FP16": (epoch(dtype=FP16), "the scaler is off, and the forward pass ran in float16, not in BF16"),
        "backward inside autocast": (epoch(inside=True), "backward() ran inside autocast"),
        "every batch counts the same": (epoch(weigh=False), "every batch of a group counts the same"),
        "clip before unscale_": (epoch(clip="before unscale_"), "clipped while they were still scaled"),
        "last group dropped": (epoch(last=False), "fewer than `accumulate` batches, and it never made its step"),
        "schedule goes on": (epoch(always=True), "scheduler.step() ran also after a step that the scaler skipped"),
        "autocast for the CPU": (epoch(device="cpu"), 'autocast is for "cpu", whatever the device'),
        "nothing is moved": (epoch(move=False), "the batches stay on the CPU where the model is on a GPU"),
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
        "every skipped step is a fault": (
            _diagnose(stuck=lambda log: any(row["skipped"] for row in log)),
            "a step that is skipped is no fault",
        ),
        "norm above max_norm": (_diagnose(much=4.0), "a norm above max_norm is no fault"),
        "a scale that stays": (
            _diagnose(constant=lambda log: len({row["scale"] for row in log}) == 1),
            "the scale may stay where it is",
        ),
        "all skipped is one thing": (_diagnose(constant=lambda log: False), "yet the scale never falls"),
        "an inf that stays is not seen": (_diagnose(stuck=lambda log: False), "no step is taken any more"),
        "norms are not looked at": (_diagnose(much=math.inf), "clipping saw a norm about as large as the scale"),
        "other words": (lambda log: "broken", "return one of 'fine'"),
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
