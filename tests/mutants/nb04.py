"""Typical mistakes in notebook 04: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

FP16 = torch.float16


def _autocast(dtype=FP16):
    return torch.amp.autocast("cpu", dtype=dtype)


def _step(*, context=_autocast, zero=True, zero_inside=False, divide=lambda n: n, inside=None, backward_inside=False,
          scale=lambda scaler, loss, last: scaler.scale(loss), unscale=True, clip=clip_grad_norm_, clip_first=False,
          clip_late=False, clip_inside=False, step=lambda scaler, optimizer: scaler.step(optimizer), updates=1,
          update_first=False, norm=lambda m, scaler: m):  # fmt: skip
    """The right step, except for what a keyword says."""

    def train_step(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
        if zero:
            optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches, 1):
            if zero_inside:
                optimizer.zero_grad()
            with context():
                loss = loss_fn(model(x), y) / divide(len(micro_batches))
                if backward_inside:
                    scale(scaler, loss, i == len(micro_batches)).backward()
            if not backward_inside:
                scale(scaler, loss, i == len(micro_batches)).backward()
            if inside:
                inside(scaler, optimizer)
            if clip_inside:
                clip(model.parameters(), max_norm)
        if clip_first:
            clip(model.parameters(), max_norm)
        if unscale:
            scaler.unscale_(optimizer)
        if clip and not (clip_first or clip_late or clip_inside):
            clip(model.parameters(), norm(max_norm, scaler))
        if update_first:
            scaler.update()
        step(scaler, optimizer)
        if clip_late:
            clip(model.parameters(), max_norm)
        for _ in range(updates):
            scaler.update()

    return train_step


def _as_in_the_article(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    for x, y in micro_batches:
        with torch.cuda.amp.autocast():
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _summed(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    with _autocast():
        loss = sum(loss_fn(model(x), y) for x, y in micro_batches) / len(micro_batches)
    _finish(model, optimizer, scaler, loss, max_norm)


def _joined(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    optimizer.zero_grad()
    x, y = (torch.cat(part) for part in zip(*micro_batches, strict=True))
    with _autocast():
        loss = loss_fn(model(x), y)
    _finish(model, optimizer, scaler, loss, max_norm)


def _finish(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()


def _own_scaler(model, optimizer, scaler, *rest):
    _step()(model, optimizer, torch.amp.GradScaler("cpu"), *rest)


def _result_of_scale_dropped(scaler, loss, last):
    scaler.scale(loss)
    return loss


def _only_the_last(scaler, loss, last):
    return scaler.scale(loss) if last else loss


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


def _inf_replaced(model, optimizer, scaler, micro_batches, loss_fn, max_norm):
    unscale = scaler.unscale_

    def replace_first(optimizer):
        for p in model.parameters():
            p.grad.nan_to_num_(0, 0, 0)
        unscale(optimizer)

    scaler.unscale_ = replace_first
    _step()(model, optimizer, scaler, micro_batches, loss_fn, max_norm)
    del scaler.unscale_


def _by_hand_too(model, optimizer, *rest):
    _step()(model, optimizer, *rest)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.05 * p.grad


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


def _no_carry(x, exponent_bits, mantissa_bits):
    b = 2 ** (exponent_bits - 1) - 1
    exponent = max(math.floor(math.log2(x)), 1 - b)
    mantissa = min(round(x / 2.0**exponent * 2**mantissa_bits), 2 ** (mantissa_bits + 1) - 1)
    return math.inf if x >= 2.0 ** (b + 1) else mantissa * 2.0 ** (exponent - mantissa_bits)


MUTANTS = {
    "04.1": {
        "as in the article": (_as_in_the_article, "torch.cuda.amp.autocast is deprecated"),
        "deprecated name for the CPU": (
            _step(context=lambda: torch.cpu.amp.autocast(dtype=FP16)),
            "torch.cpu.amp.autocast is deprecated",
        ),
        "autocast for another device": (
            _step(context=lambda: torch.amp.autocast("cuda", dtype=FP16)),
            "ran in FP32, in an autocast for another device",
        ),
        "no autocast": (_step(context=nullcontext), "micro-batch 1 of 3 ran in FP32, outside of any autocast"),
        "bfloat16": (_step(context=lambda: _autocast(None)), "the forward pass ran in bfloat16"),
        "backward inside autocast": (_step(backward_inside=True), "backward() ran inside autocast"),
        "no zero_grad": (_step(zero=False), "in the second call of train_step the gradients of the call before"),
        "zero_grad in the loop": (_step(zero_inside=True), "zeroed between two micro-batches"),
        "one backward for all": (_summed, "all 3 forward passes came before the first backward"),
        "micro-batches joined": (_joined, "ran 1 times, the first with 24 rows"),
        "not scaled": (_step(scale=lambda scaler, loss, last: loss), "scaler.scale() was never called"),
        "only the last scaled": (_step(scale=_only_the_last), "only 1 loss was scaled"),
        "scale() without its result": (_step(scale=_result_of_scale_dropped), "it returns another one"),
        "loss not divided": (_step(divide=lambda n: 1), "were added, not averaged: the gradient is 3 times too large"),
        "divided twice": (_step(divide=lambda n: n * n), "divided by 3 twice"),
        "divided by the rows": (_step(divide=lambda n: 8 * n), "0.125 times"),
        "divided by three": (_step(divide=lambda n: 3), "with 4 micro-batches the accumulated gradient is 1.33 times"),
        "no unscale_": (_step(unscale=False), "because only step() unscaled them"),
        "clip before unscale_": (_step(clip_first=True), "because unscale_() came after clipping"),
        "unscale_ in the loop": (
            _step(inside=lambda scaler, optimizer: scaler.unscale_(optimizer), unscale=False),
            "unscale_() came after micro-batch 1 of 3",
        ),
        "unscale_ twice": (
            _step(clip=lambda p, m: None, norm=lambda m, scaler: m, step=lambda s, o: (s.unscale_(o), s.step(o))),
            "unscale_() was called 2 times in one step, a RuntimeError",
        ),
        "unscale_ after step": (
            _step(unscale=False, clip=None, step=lambda s, o: (s.step(o), s.unscale_(o))),
            "unscale_() came after scaler.step()",
        ),
        "no clipping": (_step(clip=None), "nothing has clipped it"),
        "clipped after the step": (_step(clip_late=True), "the clipping came after scaler.step()"),
        "clipped in the loop": (_step(clip_inside=True), "changed between two micro-batches"),
        "clipped element by element": (_step(clip=clip_grad_value_), "cut off element by element"),
        "clipped to another kind of norm": (
            _step(clip=lambda p, m: clip_grad_norm_(p, m, norm_type=math.inf)),
            "it was clipped, but not to that norm",
        ),
        "clipped parameter by parameter": (
            _step(clip=lambda parameters, m: [clip_grad_norm_(p, m) for p in parameters]),
            "it was clipped, but not to that norm",
        ),
        "clipped to 1": (_step(norm=lambda m, scaler: 1.0), "max_norm is 1000, and yet the optimizer got a norm of 1"),
        "around the scaler": (
            _step(step=lambda scaler, optimizer: optimizer.step()),
            "optimizer.step() went around the scaler: gradients with inf",
        ),
        "around the scaler, still scaled": (
            _step(unscale=False, clip=None, step=lambda scaler, optimizer: optimizer.step()),
            "still 4096 times too large",
        ),
        "step in the loop": (
            _step(inside=lambda s, o: (s.step(o), s.update()), unscale=False, step=lambda s, o: None, updates=0),
            "scaler.step() came after micro-batch 1 of 3",
        ),
        "no step": (_step(step=lambda s, o: None), "no optimizer step was taken"),
        "no update": (_step(updates=0), "scaler.update() was not called"),
        "update in the loop": (
            _step(inside=lambda scaler, optimizer: scaler.update(), updates=0),
            "scaler.update() came after micro-batch 1 of 3",
        ),
        "update before step": (_step(update_first=True, updates=0), "update() came before scaler.step()"),
        "update twice": (_step(updates=2), "scaler.update() was called 2 times"),
        "update only if finite": (_update_only_if_finite, "a gradient was inf, and scaler.update() was not called"),
        "a fixed scale": (
            _step(updates=0, step=lambda s, o: (s.step(o), s.update(4096.0))),
            "the scale went from 4096 to 4096, not to 2048",
        ),
        "inf is an error": (
            _step(clip=lambda p, m: clip_grad_norm_(p, m, error_if_nonfinite=True)),
            "clipping raised a RuntimeError",
        ),
        "inf replaced": (_inf_replaced, "this step has to be skipped"),
        "a scaler of its own": (_own_scaler, "a new one would forget"),
        "the model in FP16": (lambda model, *rest: model.half() and None, "the parameters are no longer FP32"),
        "a step by hand as well": (_by_hand_too, "the parameters are not what this optimizer makes of it"),
    },
    "04.2": {
        "zeros count as lost": (_share_slip(lambda g: (_flat(g).half() == 0).float().mean()), "you count exact zeros"),
        "share of all elements": (
            _share_slip(lambda g: ((_flat(g).half() == 0) & (_flat(g) != 0)).float().mean()),
            "the number of all elements",
        ),
        "smallest normal number": (
            _share_slip(lambda g: (_nonzero(g).abs() < torch.finfo(FP16).tiny).float().mean()),
            "below 2^-14",
        ),
        "smallest subnormal number": (
            _share_slip(lambda g: (_nonzero(g).abs() < torch.finfo(FP16).smallest_normal * 2**-10).float().mean()),
            "below 2^-24",
        ),
        "signs": (_share_slip(lambda g: (_nonzero(g) < 2**-25).float().mean()), "all negative elements as lost"),
        "first tensor's share": (_share_slip(lambda g: _share(g[:1])), "the first tensor alone"),
        "last tensor's share": (_share_slip(lambda g: _share(g[-1:])), "the last tensor alone"),
        "mean of the shares": (
            _share_slip(lambda g: sum(_share([t]) for t in g) / len(g)),
            "you average the tensors' shares",
        ),
        "percent": (_share_slip(lambda g: 100 * _share(g)), "in percent"),
        "what survives": (_share_slip(lambda g: 1 - _share(g)), "the share that survives"),
        "number of lost elements": (_share_slip(lambda g: (_nonzero(g).half() == 0).sum()), "FP16 turns"),
        "bfloat16": (_share_slip(lambda g: (_nonzero(g).bfloat16() == 0).float().mean()), "BF16's losses"),
        "after scaling": (
            _share_slip(lambda g: (((_nonzero(g) * _scale(g)).half()) == 0).float().mean()),
            "lost with your scale",
        ),
        "no power of two": (_scale_slip(lambda g: 65504 / _flat(g).abs().max().item()), "no power of two"),
        "nearest power": (
            _scale_slip(lambda g: _power(65504 / _flat(g).abs().max().item(), round)),
            "round to the nearest power",
        ),
        "next larger power": (
            _scale_slip(lambda g: _power(65504 / _flat(g).abs().max().item(), math.ceil)),
            "the next larger power",
        ),
        "2^16 for 65504": (_scale_slip(lambda g: _power(65536 / _flat(g).abs().max().item())), "FP16 ends at 65504"),
        "no abs": (_scale_slip(lambda g: _power(65504 / _flat(g).max().item())), "positive elements only"),
        "mean for maximum": (_scale_slip(lambda g: _power(65504 / _flat(g).abs().mean().item())), "the mean element"),
        "norm for maximum": (_scale_slip(lambda g: _power(65504 / _flat(g).norm().item())), "the norm of all"),
        "first tensor's scale": (_scale_slip(lambda g: _scale(g[:1])), "the first tensor only"),
        "last tensor's scale": (_scale_slip(lambda g: _scale(g[-1:])), "the last tensor only"),
        "never below 1": (_scale_slip(lambda g: max(1, _scale(g))), "never below 1"),
        "half of it": (_scale_slip(lambda g: _scale(g) / 2), "half of the largest possible"),
        "lifts the smallest": (
            _scale_slip(lambda g: _power(2**-24 / _nonzero(g).abs().min().item(), math.ceil)),
            "whatever becomes of the largest",
        ),
        "the exponent": (_scale_slip(lambda g: math.log2(_scale(g))), "the exponent of the scale"),
        "GradScaler's default": (_scale_slip(lambda g: 65536), "GradScaler's first guess"),
        "the other way round": (lambda g: (_scale(g), _share(g)), "the share comes first"),
        "only the share": (_share, "not two numbers"),
    },
    "04.3": {
        "everything halves": (lambda p, a, low, opt: 0.5, "everything halve"),
        "parameters halve": (_amp(per=lambda m: 6 + 4 * m), "in half precision only"),
        "parameters and gradients halve": (_amp(per=lambda m: 4 + 4 * m), "parameters and gradients"),
        "no copies": (_amp(per=lambda m: 8 + 4 * m), "2 bytes per parameter too few"),
        "all but the activations that stay": (_amp(per=lambda m: 4 + 2 * m), "you halve all but"),
        "parameters halve, lowered ones vanish": (
            _amp(per=lambda m: 6 + 4 * m, act=lambda low: 1 - low),
            "GB in FP32",
        ),
        "copies of 4 bytes": (_amp(per=lambda m: 12 + 4 * m), "4 bytes for each copied"),
        "optimizer forgotten": (_both(lambda m: 8), "what the optimizer keeps"),
        "gradients forgotten": (_both(lambda m: 4 + 4 * m), "the gradients"),
        "16 bytes always": (_both(lambda m: 16), "16 bytes per parameter for every optimizer"),
        "one moment for Adam": (_both(lambda m: 8 + 4 * min(m, 1)), "Adam keeps two moments"),
        "activations only": (
            _memory((lambda m: 0, FULL[1]), (lambda m: 0, LESS[1])),
            "you count activations only",
        ),
        "all activations halve": (_amp(act=lambda low: 0.5), "you halve all activations"),
        "lowered ones vanish": (_amp(act=lambda low: 1 - low), "vanish"),
        "relative to AMP": (_as(lambda a, b: b / a - 1), "by those of the FP32 step"),
        "what remains": (_as(lambda a, b: a / b), "the share that remains"),
        "how many times": (_as(lambda a, b: b / a), "how many times larger"),
        "percent": (_as(lambda a, b: 100 * (1 - a / b)), "in percent"),
        "bytes": (_as(lambda a, b: b - a), "these are bytes"),
        "sign": (_as(lambda a, b: a / b - 1), "the sign is wrong"),
        "never negative": (_as(lambda a, b: max(0, 1 - a / b)), "never let AMP cost memory"),
        "absolute": (_as(lambda a, b: abs(1 - a / b)), "you drop the sign"),
        "a constant": (lambda p, a, low, opt: 0.2, "6 GB of activations"),
    },
    "04.4": {
        "x itself": (lambda x, e, m: x, "x itself"),
        "truncation": (_round(math.floor), "you cut digits off"),
        "always up": (_round(math.ceil), "you always round up"),
        "half away from zero": (_round(lambda q: math.floor(q + 0.5)), "you go up, always"),
        "no subnormal numbers": (
            _round(finish=lambda y, x, b, m: 0.0 if y < 2.0 ** (1 - b) else _ends(y, b)),
            "no subnormal numbers",
        ),
        "no lower end": (_round(lowest=lambda b: -5000), "nothing ever becomes 0"),
        "smallest exponent one too low": (_round(lowest=lambda b: -b), "one too low"),
        "smallest exponent one too high": (_round(lowest=lambda b: 2 - b), "one too high"),
        "bias one too large": (_round(bias=lambda e: 2 ** (e - 1)), "one too large"),
        "bias one too small": (_round(bias=lambda e: 2 ** (e - 1) - 2), "one too small"),
        "largest exponent not reserved": (
            _round(finish=lambda y, x, b, m: y if y < 2.0 ** (b + 2) else math.inf),
            "your largest exponent",
        ),
        "no upper end": (_round(finish=lambda y, x, b, m: y), "no upper end"),
        "largest number for inf": (_round(finish=lambda y, x, b, m: min(y, _top(b, m))), "becomes the largest number"),
        "inf before rounding": (
            _round(finish=lambda y, x, b, m: math.inf if x > _top(b, m) else y),
            "before you round",
        ),
        "leading 1 counted": (_round(bits=lambda m: m - 1), "one digit too few"),
        "one digit too many": (_round(bits=lambda m: m + 1), "one digit too many"),
        "mantissa without carry": (_no_carry, "below"),
        "exponent rounded": (_round(log=round), "you round log2(x)"),
        "exponent rounded up": (_round(log=math.ceil), "round log2(x) up"),
        "always FP16": (lambda x, e, m: _round()(x, 5, 10), "always round to FP16"),
        "decimal digits": (lambda x, e, m: round(x, m), "decimal digits"),
        "fixed point": (lambda x, e, m: round(x * 2**m) / 2**m, "fixed-point"),
    },
}
