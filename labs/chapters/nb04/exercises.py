"""Exercises of notebook 04: what FP16 loses, rounding to a format; 04.1 and 04.3 have files of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labs.chapters.nb04 import solutions as solution
from labs.chapters.nb04.exercise_amp import check_train_epoch
from labs.chapters.nb04.exercise_log import check_diagnose
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Exercise, Mistake

# -- 04.2: what FP16 loses, and the scale against it


Function = Callable[..., Any]


def gradients(seed: int, sizes: Sequence[int], exponent: float, largest: float, zeros: float) -> list[Tensor]:
    """Tensors of either sign around 2^exponent, a share of exact zeros, and one negative element of size `largest`."""
    draw = torch.Generator().manual_seed(seed)
    tensors = []
    for i, size in enumerate(sizes):
        magnitude = torch.exp2(exponent + 2 * i + 3 * torch.randn(size, generator=draw)).clamp(max=0.4 * largest)
        sign = torch.randint(2, (size,), generator=draw) * 2 - 1
        tensors.append(magnitude * sign * (torch.rand(size, generator=draw) >= zeros))
    tensors[0][:5] = 2.0**-25  # in the middle between 0 and the smallest FP16 number
    tensors[1][0] = -largest
    return [t.reshape(2, -1) for t in tensors]


GRADIENTS = [
    gradients(1, (400, 60, 2000), -25, 0.013, 0.5),
    gradients(2, (50, 3000), -22, 2.0**-3 * (1 - 2.0**-13), 0.2),
    gradients(3, (700, 700, 90), -16, 3e5, 0.0),
    gradients(4, (300, 200), -29, 2.0**-9, 0.3),
    gradients(5, (2000, 2000), -14, 0.0025, 0.1),
    gradients(6, (300, 100, 400), -20, 65504 * 2.0**-14, 0.1),
]
"""The largest: an ordinary one; one that tells 65504 from 2^16; one beyond FP16; a power of two; one of many; one
that just fits, of which no logarithm that is taken in another way is rounded down."""


def check_loss_scale(f: Function) -> None:
    """The share before any scaling, then the scale; each with the slips that it invites."""
    given = [[t.clone() for t in g] for g in GRADIENTS]
    answers = [_two_numbers(f(g)) for g in given]
    if not all(torch.equal(a, b) for pair in zip(given, GRADIENTS, strict=True) for a, b in zip(*pair, strict=False)):
        raise Mistake(
            "the caller's gradients are others afterwards: an operation such as mul_() or abs_() works in place",
            "t * scale, t.abs(): a new tensor",
        )
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
    (
        lambda g: _right_share(g) * (_flat(g) != 0).float().mean().item(),
        "you divide by the number of all elements, exact zeros among them",
        ZEROS,
    ),
    (
        _share(lambda t: t.abs() < 2.0**-14),
        "you count what is below 2^-14, the smallest normal number: down to 2^-24 "
        "FP16 goes on with subnormal ones, with fewer digits",
        "t.half() == 0 is the honest test",
    ),
    (
        _share(lambda t: t.abs() < 2.0**-24),
        "you count all below 2^-24, the smallest FP16 number: what lies above its half, 2^-25, is rounded up to it",
        "t.half() == 0 is the honest test",
    ),
    (
        _share(lambda t: t.abs() < 2.0**-25),
        "you do not count 2^-25 itself: in the middle between 0 and 2^-24 it is rounded to the even one, 0",
        "t.half() == 0 is the honest test",
    ),
    *(
        (_share(lost), "you count negative elements as lost: they are below any threshold", "abs(), or t.half() == 0")
        for lost in (lambda t: t < 2.0**-25, lambda t: t <= 2.0**-25)
    ),
    *(
        (
            _share(lambda t, x=x: t.abs() < x),
            f"you count all below {x:g}: FP16 turns to zero what is 2^-25 = 2.98e-8 or less",
            "t.half() == 0 is the honest test",
        )
        for x in (1e-7, 6e-8, 1e-8, 2.0**-26, 2.0**-10)
    ),
    (
        lambda g: (_to_zero(_flat(g)).sum() / (_flat(g) != 0).sum()).item(),
        "you leave exact zeros out below the fraction line, not above it",
        ZEROS,
    ),
    (lambda g: _right_share(g) / (1 - _right_share(g)), "you divide by those that survive", "by all that are not zero"),
    (lambda g: sum(_share(_to_zero)([t]) for t in g), "you add up the tensors' shares", "put all elements together"),
    (
        lambda g: sum(_share(_to_zero)([t]) * t.numel() for t in g) / _flat(g).numel(),
        "you weigh each tensor's share by all its elements, exact zeros among them",
        ZEROS,
    ),
    (
        lambda g: _right_share(g[:1]),
        "this is the share of the first tensor, the largest of all",
        "put all elements together",
    ),
    (lambda g: _right_share(g[-1:]), "you look at the last tensor only", "put all elements together"),
    (_share(lambda t: (t.half() == 0) | t.half().isinf()), "you count what becomes inf as well", "t.half() == 0"),
    (_share(lambda t: t.half().float() != t), "you count all that FP16 rounds", "t.half() == 0"),
    (lambda g: float((_to_zero(_flat(g)) & (_flat(g) != 0)).sum()), "this is how many are lost", "their share"),
    (
        lambda g: float(np.mean([_share(_to_zero)([t]) for t in g])),
        "you average the tensors' shares: a bias of 60 elements weighs as much as a matrix of 2000",
        "put all elements together",
    ),
    (lambda g: 100 * _right_share(g), "this is in percent", "a share is between 0 and 1"),
    (lambda g: 1 - _right_share(g), "this is the share that survives", "1 minus it"),
    (
        _share(lambda t: t.bfloat16() == 0),
        "these are BF16's losses: it reaches down as far as FP32, and needs no scale",
        "float16",
    ),
    (
        lambda g: _share(lambda t: (t * solution.loss_scale(g)[1]).half() == 0)(g),
        "this is what is lost with your scale",
        "the share without any scaling is asked",
    ),
]


def _power(ratio: float, rounded: Callable[[float], float] = math.floor) -> float:
    return 2.0 ** rounded(math.log2(ratio))


def _largest(g: list[Tensor]) -> float:
    return _flat(g).abs().max().item()


def _right_scale(g: list[Tensor]) -> float:
    return _power(65504 / _largest(g))


SCALES: list[Slip] = [
    (
        lambda g: 2.0 ** (math.ceil(math.log2(65504 / _largest(g))) - 1),
        "a largest element that just reaches 65504 is finite still, and you stop below it",
        "<=, not <: 65504 itself is a number of FP16",
    ),
    (
        lambda g: 65504 / _largest(g),
        "this is no power of two: multiplying by it rounds every gradient",
        "2 ** floor(log2(...)): a power of two changes the exponent only",
    ),
    (
        lambda g: _power(65504 / _largest(g), math.ceil),
        "you take the next larger power of two: the largest element becomes inf",
        "floor(log2(...))",
    ),
    *(
        (lambda g, f=factor: f * _right_scale(g), what, hint)
        for factor, what, hint in (
            (0.5, "your exponent is one too small: twice as much still fits", "2 ** floor(log2(65504 / largest))"),
            (
                0.25,
                "your exponent is two too small: four times as much still fits",
                "2 ** floor(log2(65504 / largest))",
            ),
            (
                4.0,
                "your exponent is two too large: the largest element becomes inf",
                "2 ** floor(log2(65504 / largest))",
            ),
        )
    ),
    (
        lambda g: _power(65504 / _largest(g), round),
        "you round the exponent: where that is up, the largest element becomes inf",
        "floor(log2(...))",
    ),
    (
        lambda g: _power(65504 / _largest(g), int),
        "int() cuts a negative exponent towards 0, which is up: the largest element becomes inf",
        "floor(log2(...))",
    ),
    (
        lambda g: 1 / _right_scale(g),
        "the sign of the exponent is wrong: this scale makes gradients smaller",
        "65504 / largest, not largest / 65504",
    ),
    (
        lambda g: _power(_largest(g) / 65504),
        "you divide the largest element by 65504: this scale makes gradients smaller",
        "65504 / largest",
    ),
    *(
        (lambda g, t=top, r=rounded: 2.0 ** (t - r(math.log2(_largest(g)))), what, "floor(log2(65504 / largest))")
        for top, rounded, what in (
            (16, math.floor, "16 - floor(log2(largest)): the exponent is one too large"),
            (15, math.floor, "15 - floor(log2(largest)), or 65535 for 65504: just below a power of two it becomes inf"),
            (14, math.floor, "14 - floor(log2(largest)): twice as much still fits"),
        )
    ),
    (
        lambda g: _power(32768 / _largest(g)),
        "you lift the largest element to 2^15 at most, and FP16 goes on to 65504",
        "torch.finfo(torch.float16).max",
    ),
    (
        lambda g: _power(1 / _largest(g)),
        "you lift the largest element to 1, and FP16 goes on to 65504",
        "torch.finfo(torch.float16).max",
    ),
    *(
        (lambda g, b=base, log=log: b ** math.floor(log(65504 / _largest(g))), what, "2 ** floor(log2(...))")
        for base, log, what in (
            (10.0, math.log10, "this is a power of ten"),
            (math.e, math.log, "this is a power of e"),
            (2.0, math.log, "your exponent is a natural logarithm"),
            (2.0, math.log10, "your exponent is a decimal logarithm"),
        )
    ),
    (
        lambda g: _power(torch.finfo(torch.bfloat16).max / _largest(g)),
        "this is BF16's or FP32's largest number",
        "torch.finfo(torch.float16).max",
    ),
    (
        lambda g: _power(65504 / _flat(g)[_flat(g) != 0].abs().min().item()),
        "you take the smallest element for the largest",
        "abs().max()",
    ),
    *(
        (
            lambda g, of=of: _power(65504 / of(_flat(g)).item()),
            f"you take the {name} for the largest element",
            "each element has to fit by itself: abs().max()",
        )
        for name, of in (
            ("sum of all", lambda t: t.abs().sum()),
            ("norm of all", Tensor.norm),
            ("standard deviation", Tensor.std),
            ("mean of all", lambda t: t.abs().mean()),
            ("mean of the non-zero elements", lambda t: t[t != 0].abs().mean()),
        )
    ),
    *(
        (
            lambda g, part=part: _power(65504 / _largest(g[part])),
            f"you look at the {name} tensor only",
            "one scale for all of them",
        )
        for name, part in (("first", slice(1)), ("last", slice(-1, None)))
    ),
    (
        lambda g: min(65536.0, _right_scale(g)),
        "your scale ends at 65536, where GradScaler begins: it may be larger",
        "2 ** floor(log2(65504 / largest))",
    ),
    (lambda g: 65536.0, "this is the scale with which GradScaler begins, whatever the gradients", "ask the largest"),
    (
        lambda g: float(int(65504 / _largest(g))),
        "int() makes a whole number of the ratio, no power of two",
        "2 ** floor(log2(...))",
    ),
    (
        lambda g: _power(65536 / _largest(g)),
        "FP16 ends at 65504, not at 2^16: what is scaled to 65520 or more is inf",
        "torch.finfo(torch.float16).max",
    ),
    (
        lambda g: _power(65504 / _flat(g).max().item()),
        "you look at positive elements only; the largest is negative",
        "abs() first",
    ),
    (
        lambda g: max(1.0, _power(65504 / _largest(g))),
        "your scale is never below 1: with an element of 3e5 it must be",
        "a negative power of two is one, too",
    ),
    (
        lambda g: _power(2.0**-24 / _flat(g)[_flat(g) != 0].abs().min().item(), math.ceil),
        "you lift the smallest element into FP16, whatever becomes of the largest",
        "overflow is what limits the scale: 65504 / largest",
    ),
    (lambda g: -math.log2(_right_scale(g)), "this is the exponent of the scale, with the wrong sign", "2 ** it"),
    (lambda g: math.log2(solution.loss_scale(g)[1]), "this is the exponent of the scale", "2 ** it"),
]


# -- 04.4: round to any format


FORMATS = {(5, 10): "FP16", (8, 7): "BF16", (8, 10): "TF32", (5, 2): "FP8 e5m2"}
Case = tuple[float, int, int]
"""x, exponent_bits, mantissa_bits"""


def _cases(e: int, m: int) -> Iterator[Case]:
    """Ordinary numbers, ties, a carry into the next exponent, subnormal ones, both sides of the overflow."""
    step, bias = 2.0**-m, 2 ** (e - 1) - 1
    smallest, largest, last_step = 2.0 ** (1 - bias - m), 2.0**bias * (2 - step), 2.0 ** (bias - m)
    ordinary = (0.1, 1 / 3, 1.0, 2.7, 1 + 0.3 * step, 4 * (1 + 1.8 * step), 2 - 0.2 * step)
    ties = (1 + 0.5 * step, 1 + 1.5 * step, 2 + 5 * step)
    subnormal = (0.3 * smallest, 0.7 * smallest, 1.3 * smallest, 2.6 * smallest)
    edge = (0.8 * largest, largest, largest + 0.3 * last_step, largest + 0.7 * last_step, 1.5 * largest, 3 * largest)
    yield from ((x, e, m) for x in (*ordinary, *ties, *subnormal, *edge))


CASES = [case for e, m in (*FORMATS, (4, 3), (3, 2)) for case in _cases(e, m)]


def check_round_to(f: Function) -> None:
    """Known formats and two small ones, at every place where rounding has a rule of its own."""
    got = [_float(f(*case), case) for case in CASES]
    question = Question("the nearest number", CASES, ROUNDINGS, _format_facts, "spacing 2^(exponent - mantissa_bits)")
    question.judge(got, [solution.round_to(*case) for case in CASES])


def _float(value: Any, case: Case) -> float:
    """`value` as a float; infinity is an answer here, NaN is none."""
    if isinstance(value, float | np.floating | Tensor) and value != value:
        raise Mistake(
            f"{_format_facts(case)}: you return nan",
            "what is too large is math.inf; inf / inf, inf - inf and inf * 0 are nan",
        )
    return math.inf if isinstance(value, float | np.floating | Tensor) and value == math.inf else number(value, "0.25")


def _format_facts(case: Case) -> str:
    x, e, m = case
    known = f", {FORMATS[e, m]}" if (e, m) in FORMATS else ""
    return f"{x:.9g} with {e} exponent and {m} mantissa bits{known}"


def _cut(x: float) -> int:
    return math.floor(x)


def _away(x: float) -> int:
    return math.floor(x + 0.5)


def _rounded(
    rounded: Callable[[float], float] = round,
    *,
    bias: Callable[[int], int] = lambda e: 2 ** (e - 1) - 1,
    lowest: int | None = 1,
    digits: int = 0,
    exponent: Callable[[float], int] = math.floor,
    carry: bool = True,
    top: int = 1,
) -> Function:
    """The reference with one part exchanged; lowest=None: exponents have no lower end."""

    def value(case: Case) -> float:
        x, e, m = case
        power = exponent(math.log2(x))
        power = power if lowest is None else max(power, lowest - bias(e))
        whole = rounded(x / 2.0 ** (power - m - digits))
        whole = whole if carry else min(whole, 2 ** (m + 1) - 1)
        nearest = whole * 2.0 ** (power - m - digits)
        return nearest if nearest < 2.0 ** (bias(e) + top) else math.inf

    return value


_right_rounding = _rounded()


def _largest_of(case: Case) -> float:
    return 2.0 ** (2 ** (case[1] - 1) - 1) * (2 - 2.0 ** -case[2])


def _flushed(case: Case) -> float:
    return 0.0 if _right_rounding(case) < 2.0 ** (2 - 2 ** (case[1] - 1)) else _right_rounding(case)


def _upper(x: float) -> int:
    return math.ceil(x)


def _down(x: float) -> int:
    return math.ceil(x - 0.5)


def _odd(x: float) -> int:
    return round(x) if x % 1 != 0.5 else math.floor(x) + (math.floor(x) % 2 == 0)


def _spacing(case: Case) -> float:
    x, e, m = case
    return 2.0 ** (max(math.floor(math.log2(x)), 2 - 2 ** (e - 1)) - m)


BIAS = "2 ** (exponent_bits - 1) - 1"
BIASES: tuple[tuple[Callable[[int], int], str], ...] = (
    (lambda e: 2 ** (e - 1), "your bias is one too large: 2 ** (exponent_bits - 1), without the - 1"),
    (lambda e: 2 ** (e - 1) - 2, "your bias is one too small"),
    (lambda e: 2 ** (e - 1) + 1, "your bias is two too large: + 1 in place of - 1"),
    (lambda e: 2**e - 1, "your bias is that of one exponent bit more: 2 ** exponent_bits, less 1 or not"),
    (lambda e: 2 ** (e - 2) - 1, "your bias is that of one exponent bit fewer"),
    (lambda e: 127, "your bias is 127 for every format"), (lambda e: 15, "your bias is 15 for every format"),
    (lambda e: e - 1, "your bias is exponent_bits - 1: the power of two is missing"),
)  # fmt: skip
FLOOR = "floor(log2(x))"

ROUNDINGS: list[Slip] = [
    *((_rounded(bias=bias), what, BIAS) for bias, what in BIASES),
    (_rounded(_upper), "you round up, always: ceil in place of the nearest", "round(x / spacing) * spacing"),
    (
        _rounded(_down),
        "in the middle between two numbers you go down, always",
        "to the even one of the two, as round() does",
    ),
    (_rounded(_odd), "in the middle between two numbers you take the odd one", "the even one, as round() does"),
    *(
        (_rounded(digits=digits), what, "spacing 2^(exponent - mantissa_bits)")
        for digits, what in (
            (1, "you keep one digit too many: the leading 1 is not among mantissa_bits"),
            (-1, "you keep one digit too few: the leading 1 is not stored, and not among mantissa_bits"),
            (2, "you keep two digits too many"),
            (-2, "you keep two digits too few"),
        )
    ),
    (_rounded(exponent=int), "int(log2(x)) cuts towards 0: below 1 the exponent is one too large", FLOOR),
    (
        _rounded(exponent=math.ceil),
        "ceil(log2(x)), or that of math.frexp, whose mantissas begin at 0.5: the exponent is one too large",
        FLOOR,
    ),
    *(
        (
            _rounded(exponent=lambda log, of_2=of_2: math.floor(log * of_2)),
            f"your exponent is a {name} logarithm",
            FLOOR,
        )
        for name, of_2 in (("natural", math.log(2)), ("decimal", math.log10(2)))
    ),
    *(
        (_rounded(lowest=lowest), what, "max(exponent, 1 - bias)")
        for lowest, what in (
            (2, "your smallest exponent is one too high"),
            (-1, "your smallest exponent is two too low"),
            (0, "your smallest exponent is one too low: 1 - bias, as exponent 0 is kept for subnormal numbers"),
        )
    ),
    (_rounded(top=0), "your largest exponent is one too low: it is the bias", "all of 2^(bias + 1) and above is inf"),
    (
        lambda c: _right_rounding(c) if _right_rounding(c) < _largest_of(c) else math.inf,
        "the largest number itself becomes inf",
        "all of 2^(bias + 1) and above is inf",
    ),
    (
        lambda c: y if (y := _rounded(top=700)(c)) <= 65504 else math.inf,
        "every format ends at 65504, as FP16 does",
        "all of 2^(bias + 1) and above is inf",
    ),
    (
        lambda c: _rounded(top=2)(c) if c[0] < 2.0**2 ** (c[1] - 1) else math.inf,
        "what is rounded up to 2^(bias + 1) stays finite: you look before you round, or take <= for <",
        "round first; all of 2^(bias + 1) and above is inf",
    ),
    (
        lambda c: _right_rounding(c) if c[0] >= _spacing((1e-300, *c[1:])) else 0.0,
        "all below the smallest number becomes 0: what lies above its half is rounded up to it",
        "round(x / spacing) * spacing",
    ),
    (
        lambda c: max(_right_rounding(c), _spacing((1e-300, *c[1:]))),
        "nothing becomes 0: you end at the smallest number",
        "below its half it is 0",
    ),
    (
        lambda c: max(_right_rounding(c), 2.0 ** (2 - 2 ** (c[1] - 1))),
        "you end at the smallest normal number",
        "below it come subnormal ones, down to 0",
    ),
    (lambda c: float(round(c[0] / _spacing(c))), "this is how many spacings x has", "times the spacing"),
    (_spacing, "this is the spacing", "round(x / spacing) * spacing"),
    *(
        (lambda c, bits=bits: _right_rounding((c[0], *bits)), f"you always round to {name}", "the bits are arguments")
        for bits, name in FORMATS.items()
    ),
    (lambda c: _right_rounding((*c[:2], 10)), "you always keep 10 mantissa bits", "mantissa_bits"),
    (
        lambda c: _right_rounding((c[0], c[2], c[1])),
        "you have taken exponent_bits for mantissa_bits",
        "(x, exponent_bits, mantissa_bits)",
    ),
    (lambda c: c[0], "you return x itself", "most numbers lie between two of the format"),
    (_rounded(_cut), "you cut digits off: the result is never above x", "to the nearest: round(x / spacing) * spacing"),
    (
        _rounded(_away),
        "in the middle between two numbers you go up, always: over many sums this adds up",
        "to the even one of the two, as round() does",
    ),
    (
        _rounded(lowest=None),
        "your exponents go down for ever: nothing ever becomes 0",
        "below 2^(1 - bias) the spacing stays what it is there: max(exponent, 1 - bias)",
    ),
    (
        _flushed,
        "you have no subnormal numbers: below 2^(1 - bias) all becomes 0",
        "the spacing stays what it is at 2^(1 - bias): max(exponent, 1 - bias)",
    ),
    (
        _rounded(top=2),
        "your largest exponent is one too high: its bits stand for inf and NaN",
        "all of 2^(bias + 1) and above is inf",
    ),
    (_rounded(top=700), "your numbers have no upper end", "all of 2^(bias + 1) and above is inf"),
    (
        lambda c: min(_right_rounding(c), _largest_of(c)),
        "what is too large becomes the largest number",
        "IEEE 754 makes it inf, and GradScaler relies on that",
    ),
    (
        lambda c: math.inf if c[0] > _largest_of(c) else _right_rounding(c),
        "you compare with the largest number before you round: FP16 rounds 65510 down to 65504",
        "round first, then ask whether it is still in the format",
    ),
    (
        _rounded(carry=False),
        "a mantissa that is rounded up to 2 stays below it",
        "1.11...1 rounds to the next power of two, with mantissa 0",
    ),
    (_rounded(exponent=round), "you round log2(x): x = 3 then has the spacing of 4", "floor(log2(x))"),
    *(
        (
            lambda c, ends=ends: math.inf if ends(c) == math.inf else round(c[0] * 2.0 ** c[2]) / 2.0 ** c[2],
            "your spacing is the same everywhere: these are fixed-point numbers",
            "the spacing doubles at each power of two: 2^(exponent - mantissa_bits)",
        )
        for ends in (_right_rounding, lambda c: 0.0)
    ),
]


EXERCISES = {
    "04.1": Exercise("an epoch in FP16 or BF16", check_train_epoch, solution.train_epoch),
    "04.2": Exercise("what FP16 loses, and the scale against it", check_loss_scale, solution.loss_scale),
    "04.3": Exercise("what a training log says of its scaler", check_diagnose, solution.diagnose),
    "04.4": Exercise("round to any format", check_round_to, solution.round_to),
}
