"""Checker of exercise 04.4: rounding to a number format, with the mistake of each of its rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from labs.chapters.nb04 import solutions as solution
from labs.kit.answers import Question, Slip, number

Function = Callable[..., Any]

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
    edge = (largest, largest + 0.3 * last_step, largest + 0.7 * last_step, 3 * largest)
    yield from ((x, e, m) for x in (*ordinary, *ties, *subnormal, *edge))


CASES = [case for e, m in (*FORMATS, (4, 3), (3, 2)) for case in _cases(e, m)]


def check_round_to(f: Function) -> None:
    """Known formats and two small ones, at every place where rounding has a rule of its own."""
    got = [_float(f(*case)) for case in CASES]
    question = Question("the nearest number", CASES, ROUNDINGS, _facts, "spacing 2^(exponent - mantissa_bits)")
    question.judge(got, [solution.round_to(*case) for case in CASES])


def _float(value: Any) -> float:
    return math.inf if isinstance(value, (float, np.floating, Tensor)) and value == math.inf else number(value, "0.25")


def _facts(case: Case) -> str:
    x, e, m = case
    known = f", {FORMATS[e, m]}" if (e, m) in FORMATS else ""
    return f"{x:.9g} with {e} exponent and {m} mantissa bits{known}"


def _cut(x: float) -> int:
    return math.floor(x)


def _away(x: float) -> int:
    return math.floor(x + 0.5)


def _rounded(rounded: Callable[[float], float] = round, *, bias: Callable[[int], int] = lambda e: 2 ** (e - 1) - 1,
             lowest: int | None = 1, digits: int = 0, exponent: Callable[[float], int] = math.floor,
             carry: bool = True, top: int = 1) -> Function:  # fmt: skip
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


ROUNDINGS: list[Slip] = [
    (lambda c: c[0], "you return x itself", "most numbers lie between two of the format"),
    (_rounded(_cut), "you cut digits off: the result is never above x", "to the nearest: round(x / spacing) * spacing"),
    (_rounded(math.ceil), "you always round up", "to the nearest: round(x / spacing) * spacing"),
    (_rounded(_away), "in the middle between two numbers you go up, always: over many sums this adds up",
     "to the even one of the two, as round() does"),
    (_rounded(lowest=None), "your exponents go down for ever: nothing ever becomes 0",
     "below 2^(1 - bias) the spacing stays what it is there: max(exponent, 1 - bias)"),
    (_flushed, "you have no subnormal numbers: below 2^(1 - bias) all becomes 0",
     "the spacing stays what it is at 2^(1 - bias): max(exponent, 1 - bias)"),
    (_rounded(lowest=0), "your smallest exponent is one too low: 1 - bias, as exponent 0 is kept for subnormal numbers",
     "max(exponent, 1 - bias)"),
    (_rounded(lowest=2), "your smallest exponent is one too high", "max(exponent, 1 - bias)"),
    (_rounded(bias=lambda e: 2 ** (e - 1)), "your bias is one too large", "2^(exponent_bits - 1) - 1: FP16 has 15"),
    (_rounded(bias=lambda e: 2 ** (e - 1) - 2), "your bias is one too small", "2^(exponent_bits - 1) - 1: FP16 has 15"),
    (_rounded(top=2), "your largest exponent is one too high: its bits stand for inf and NaN",
     "all of 2^(bias + 1) and above is inf"),
    (_rounded(top=700), "your numbers have no upper end", "all of 2^(bias + 1) and above is inf"),
    (lambda c: min(_right_rounding(c), _largest_of(c)), "what is too large becomes the largest number",
     "IEEE 754 makes it inf, and GradScaler relies on that"),
    (lambda c: math.inf if c[0] > _largest_of(c) else _right_rounding(c), "you compare with the largest number before "
     "you round: FP16 rounds 65510 down to 65504", "round first, then ask whether it is still in the format"),
    (_rounded(digits=-1), "you keep one digit too few: the leading 1 is not stored, and not among mantissa_bits",
     "spacing 2^(exponent - mantissa_bits)"),
    (_rounded(digits=1), "you keep one digit too many", "spacing 2^(exponent - mantissa_bits)"),
    (_rounded(carry=False), "a mantissa that is rounded up to 2 stays below it", "1.11...1 rounds to the next power of "
     "two, with mantissa 0"),
    (_rounded(exponent=round), "you round log2(x): x = 3 then has the spacing of 4", "floor(log2(x))"),
    (_rounded(exponent=math.ceil), "you round log2(x) up: between 2 and 4 you have the spacing of 4 to 8",
     "floor(log2(x))"),
    (lambda c: _right_rounding((c[0], 5, 10)), "you always round to FP16", "the bits are arguments"),
    (lambda c: _right_rounding((c[0], 8, c[2])), "you always use 8 exponent bits", "the bits are arguments"),
    (lambda c: round(c[0], c[2]), "you keep decimal digits", "mantissa_bits are binary, after the leading 1"),
    (lambda c: round(c[0] * 2.0 ** c[2]) / 2.0 ** c[2], "your spacing is the same everywhere: these are fixed-point "
     "numbers", "the spacing doubles at each power of two: 2^(exponent - mantissa_bits)"),
]  # fmt: skip
