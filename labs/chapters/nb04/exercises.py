"""Exercises of notebook 04: the FP16 training step, what FP16 loses, what autocast saves, rounding to a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labs.chapters.nb04 import solutions as solution
from labs.chapters.nb04.exercise_amp import check_train_step
from labs.chapters.nb04.exercise_formats import check_round_to
from labs.chapters.nb04.exercise_fp16 import check_loss_scale
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Exercise

Function = Callable[..., Any]

# -- 04.3: what autocast saves

STEPS = [
    (3e8, 6e9, 0.9, "adam"), (3e8, 4e10, 0.9, "adam"), (6e7, 1.1e10, 0.95, "momentum"), (2.5e7, 3e9, 0.4, "sgd"),
    (1e9, 1e8, 0.8, "adam"),
]  # fmt: skip
"""(parameters, activation_bytes, lowered_share, optimizer); the last has next to no activations."""
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}


def _bytes(p: float, a: float, low: float, opt: str, *, weights: float = 4, grads: float = 4, moment: float = 4,
           copies: float = 0, kept: float = 1, moments: dict[str, int] = MOMENTS) -> float:  # fmt: skip
    """Bytes of a step, by bytes per element and the share of lowered activations that is kept."""
    return p * (weights + grads + moments[opt] * moment + copies) + a * (1 - low + low * kept)


def _saved(both: dict[str, Any] | None = None, all_lowered: bool = False, **amp: Any) -> Function:
    """The saved share, with faults `both` in FP32 and AMP, and `amp` in AMP alone."""

    def share(case: tuple) -> float:
        p, a, low, opt = case
        lowered = (p, a, 1.0 if all_lowered else low, opt)
        return 1 - _bytes(*lowered, **{"copies": 2, "kept": 0.5} | (both or {}) | amp) / _bytes(*case, **(both or {}))

    return share


_right = _saved()
FIXED = "parameters, gradients and moments stay FP32: 4 bytes each, with and without autocast"
COPY = "autocast keeps a 2-byte copy of every parameter beside the FP32 one"
SAVED: list[Slip] = [
    (lambda c: 0.5, "you let everything halve", "only the lowered activations do; " + FIXED),
    (_saved(weights=2, copies=0), "your AMP step has the parameters in half precision only",
     f"they stay FP32, and {COPY}"),
    (_saved(weights=2, grads=2, copies=0), "you halve parameters and gradients", FIXED),
    (_saved(weights=2, grads=2, moment=2, copies=0), "you halve all but the activations that are not lowered", FIXED),
    (_saved(copies=0), "your AMP step has 2 bytes per parameter too few: no copies, or gradients in half precision",
     f"{COPY}, and .grad stays FP32"),
    (_saved(copies=4), "you count 4 bytes for each copied parameter", "a half-precision number has 2 bytes"),
    (_saved(both={"moment": 0}), "you forget what the optimizer keeps", "momentum: 1 number per parameter, Adam: 2"),
    (_saved(both={"grads": 0}), "you forget the gradients", FIXED),
    (_saved(both={"weights": 0}), "you forget the parameters themselves", FIXED),
    (_saved(both={"moments": dict.fromkeys(MOMENTS, 2)}), "you count 16 bytes per parameter for every optimizer: that "
     "is Adam", "momentum: 1 number per parameter, plain SGD: none"),
    (_saved(both={"moments": MOMENTS | {"adam": 1}}), "Adam keeps two moments per parameter, not one", FIXED),
    (_saved(both={"weights": 0, "grads": 0, "moment": 0}, copies=0), "you count activations only", FIXED),
    (_saved(all_lowered=True), "you halve all activations", "only lowered_share of them halves: the rest stays FP32"),
    (_saved(kept=0), "the lowered activations vanish in your AMP step", "half of their bytes remains"),
    (lambda c: 1 / (1 - _right(c)) - 1, "you divide what is saved by AMP's bytes", "by those of the FP32 step"),
    (lambda c: 1 - _right(c), "this is the share that remains", "1 minus it"),
    (lambda c: 1 / (1 - _right(c)), "this is how many times larger FP32 is", "1 - amp_bytes / fp32_bytes"),
    (lambda c: 100 * _right(c), "this is in percent", "a share: 1 for all"),
    (lambda c: _right(c) * _bytes(*c), "these are bytes", "divide by the bytes of the FP32 step"),
    (lambda c: -_right(c), "the sign is wrong: positive means that AMP saves", "1 - amp_bytes / fp32_bytes"),
    (lambda c: max(0.0, _right(c)), "you never let AMP cost memory; with few activations it does", "no max(0, ...)"),
    (lambda c: abs(_right(c)), "you drop the sign; with few activations AMP needs more memory, not less", "no abs()"),
]  # fmt: skip


def check_saved_share(f: Function) -> None:
    """Five jobs, from one with mostly activations to one in which autocast costs memory."""
    got = [number(f(*case), "0.2") for case in STEPS]
    Question("the saved share", STEPS, SAVED, _facts, FIXED).judge(got, [solution.saved_share(*c) for c in STEPS])


def _facts(case: tuple) -> str:
    p, a, low, opt = case
    fp32_gb, amp_gb = _bytes(*case) / 1e9, _bytes(*case, copies=2, kept=0.5) / 1e9
    return (f"{p / 1e6:g} M parameters, {a / 1e9:g} GB of activations, {low:g} of them lowered, {opt!r}: "
            f"{fp32_gb:.4g} GB in FP32, {amp_gb:.4g} GB with autocast")  # fmt: skip


EXERCISES = {
    "04.1": Exercise("the FP16 step with accumulation and clipping", check_train_step, solution.train_step),
    "04.2": Exercise("what FP16 loses, and the scale against it", check_loss_scale, solution.loss_scale),
    "04.3": Exercise("the share of memory that autocast saves", check_saved_share, solution.saved_share),
    "04.4": Exercise("round to any format", check_round_to, solution.round_to),
}
