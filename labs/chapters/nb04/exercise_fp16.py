"""Checker of exercise 04.2: what FP16 makes of some gradients, and the largest scale that it bears."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labs.chapters.nb04 import solutions as solution
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Mistake

Function = Callable[..., Any]


def gradients(seed: int, sizes: Sequence[int], exponent: float, largest: float, zeros: float) -> list[Tensor]:
    """Tensors of either sign around 2^exponent, a share of exact zeros, and one negative element of size `largest`."""
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for i, size in enumerate(sizes):
        magnitude = torch.exp2(exponent + 2 * i + 3 * torch.randn(size, generator=draw)).clamp(max=0.4 * largest)
        sign = torch.randint(2, (size,), generator=draw) * 2 - 1
        tensors.append(magnitude * sign * (torch.rand(size, generator=draw) >= zeros))
    tensors[1][0] = -largest
    return [t.reshape(2, -1) for t in tensors]


GRADIENTS = [
    gradients(1, (400, 60, 2000), -25, 0.013, 0.5),
    gradients(2, (50, 3000), -22, 2.0**-3 * (1 - 2.0**-13), 0.2),
    gradients(3, (700, 700, 90), -16, 3e5, 0.0),
    gradients(4, (300, 200), -29, 2.0**-9, 0.3),
    gradients(5, (2000, 2000), -14, 0.0025, 0.1),
]
"""The largest: an ordinary one; one that tells 65504 from 2^16; one beyond FP16; a power of two; one of many."""


def check_loss_scale(f: Function) -> None:
    """The share before any scaling, then the scale; each with the slips that it invites."""
    answers = [_two_numbers(f([t.clone() for t in g])) for g in GRADIENTS]
    shares, scales = zip(*answers, strict=True)
    right = [solution.loss_scale(g) for g in GRADIENTS]
    if np.allclose(answers, [pair[::-1] for pair in right], rtol=1e-3):
        raise Mistake("you return (scale, share_lost)", "the share comes first")
    Question("share_lost", GRADIENTS, SHARES, _share_facts, "(t.half() == 0) among t != 0").judge(
        shares, [share for share, _ in right]
    )
    Question("scale", GRADIENTS, SCALES, _scale_facts, "2 ** floor(log2(65504 / largest))").judge(
        scales, [scale for _, scale in right]
    )


def _two_numbers(answer: Any) -> tuple[float, float]:
    try:
        share, scale = answer
    except (TypeError, ValueError):
        raise Mistake(f"you return {answer!r:.60}, not two numbers", "return share_lost, scale") from None
    return number(share, "0.25 for the share"), number(scale, "1024 for the scale")


def _flat(g: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in g])


def _share_facts(g: list[Tensor]) -> str:
    flat = _flat(g)
    lost = ((flat.half() == 0) & (flat != 0)).sum()
    return f"of {(flat != 0).sum()} non-zero elements in {len(g)} tensors, FP16 turns {lost} to zero"


def _scale_facts(g: list[Tensor]) -> str:
    return f"the largest of all elements is {_flat(g).abs().max():.6g} in size"


def _share(lost: Callable[[Tensor], Tensor], of: Callable[[Tensor], Tensor] = lambda t: t != 0) -> Callable:
    """Share of the elements of `of` that are `lost`, all tensors pooled."""
    return lambda g: ((lost(_flat(g)) & of(_flat(g))).sum() / of(_flat(g)).sum()).item()


def _to_zero(t: Tensor) -> Tensor:
    return t.half() == 0


def _everything(t: Tensor) -> Tensor:
    return torch.ones_like(t, dtype=torch.bool)


_right_share = _share(_to_zero)
ZEROS = "exact zeros were zero before: leave them out, above and below the fraction line"
SHARES: list[Slip] = [
    (_share(_to_zero, _everything), "you count exact zeros as lost", ZEROS),
    (lambda g: _right_share(g) * (_flat(g) != 0).float().mean().item(),
     "you divide by the number of all elements, exact zeros among them", ZEROS),
    (_share(lambda t: t.abs() < 2.0**-14), "you count what is below 2^-14, the smallest normal number: down to 2^-24 "
     "FP16 goes on with subnormal ones, with fewer digits", "t.half() == 0 is the honest test"),
    (_share(lambda t: t.abs() < 2.0**-24), "you count all below 2^-24, the smallest FP16 number: what lies above its "
     "half, 2^-25, is rounded up to it", "t.half() == 0 is the honest test"),
    (_share(lambda t: t < 2.0**-25), "you count all negative elements as lost", "abs() first"),
    (lambda g: _share(_to_zero)([g[0]]), "this is the share of the first tensor alone", "put all elements together"),
    (lambda g: _share(_to_zero)([g[-1]]), "this is the share of the last tensor alone", "put all elements together"),
    (lambda g: float(np.mean([_share(_to_zero)([t]) for t in g])), "you average the tensors' shares: a bias of 60 "
     "elements weighs as much as a matrix of 2000", "put all elements together"),
    (lambda g: 100 * _right_share(g), "this is in percent", "a share is between 0 and 1"),
    (lambda g: 1 - _right_share(g), "this is the share that survives", "1 minus it"),
    (_share(lambda t: t.bfloat16() == 0), "these are BF16's losses: it reaches down as far as FP32, and needs no scale",
     "float16"),
    (_share(lambda t: (t * 65536.0).half() == 0), "this is what a scale of 65536 leaves lost",
     "the share without any scaling is asked"),
    (lambda g: _share(lambda t: (t * solution.loss_scale(g)[1]).half() == 0)(g), "this is what is lost with your scale",
     "the share without any scaling is asked"),
]  # fmt: skip


def _power(ratio: float, rounded: Callable[[float], float] = math.floor) -> float:
    return 2.0 ** rounded(math.log2(ratio))


def _largest(g: list[Tensor]) -> float:
    return _flat(g).abs().max().item()


SCALES: list[Slip] = [
    (lambda g: 65504 / _largest(g), "this is no power of two: multiplying by it rounds every gradient",
     "2 ** floor(log2(...)): a power of two changes the exponent only"),
    (lambda g: _power(65504 / _largest(g), round), "you round to the nearest power of two: where that is the larger "
     "one, the largest element becomes inf", "floor(log2(...))"),
    (lambda g: _power(65504 / _largest(g), math.ceil), "you take the next larger power of two: the largest element "
     "becomes inf", "floor(log2(...))"),
    (lambda g: _power(65536 / _largest(g)), "FP16 ends at 65504, not at 2^16: what is scaled to 65520 or more is inf",
     "torch.finfo(torch.float16).max"),
    (lambda g: _power(65504 / _flat(g).max().item()), "you look at positive elements only; the largest is negative",
     "abs() first"),
    (lambda g: _power(65504 / _flat(g).abs().mean().item()), "you take the mean element for the largest: all far above "
     "it become inf", "max, not mean"),
    (lambda g: _power(65504 / _flat(g).norm().item()), "you take the norm of all for the largest element",
     "each element has to fit by itself: abs().max()"),
    (lambda g: _power(65504 / g[0].abs().max().item()), "you look at the first tensor only", "one scale for all"),
    (lambda g: _power(65504 / g[-1].abs().max().item()), "you look at the last tensor only", "one scale for all"),
    (lambda g: max(1.0, _power(65504 / _largest(g))), "your scale is never below 1: with an element of 3e5 it must be",
     "a negative power of two is one, too"),
    (lambda g: _power(2.0**-24 / _flat(g)[_flat(g) != 0].abs().min().item(), math.ceil), "you lift the smallest "
     "element into FP16, whatever becomes of the largest", "overflow is what limits the scale: 65504 / largest"),
    (lambda g: _power(65504 / _largest(g)) / 2, "half of the largest possible: twice this scale is still finite",
     "floor(log2(65504 / largest)) is low enough"),
    (lambda g: math.log2(solution.loss_scale(g)[1]), "this is the exponent of the scale", "2 ** it"),
    (lambda g: 65536.0, "this is GradScaler's first guess", "compute it from the largest element"),
    (lambda g: 1 / solution.loss_scale(g)[1], "this is what unscale_ multiplies by", "its inverse"),
]  # fmt: skip
