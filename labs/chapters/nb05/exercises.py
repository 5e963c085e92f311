"""Exercises of notebook 05: files that survive, recomputation by hand, what fits with segments, a complete state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labs.chapters.nb05 import solutions as solution
from labs.chapters.nb05.exercise_files import check_checkpoints
from labs.chapters.nb05.exercise_recompute import check_checkpointed
from labs.chapters.nb05.exercise_resume import check_resumable
from labs.kit.answers import Question, Slip, number
from labs.kit.check import Exercise, Mistake

Function = Callable[..., Any]

# -- 05.3: what fits with segments

MB = 1e6
Case = tuple[float, float, int, float, float]
"""(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes)"""
JOBS: list[Case] = [
    (24e9, 6e9, 23, 40 * MB, 4 * MB), (80e9, 30e9, 100, 40 * MB, 40 * MB), (16e9, 1e9, 30, 24 * MB, 3 * MB),
    (24e9, 3e9, 8, 70 * MB, 70 * MB), (11e9, 9e9, 47, 30 * MB, 2 * MB), (24e9, 8e9, 12, 90 * MB, 1 * MB),
    (24e9, 26e9, 24, 40 * MB, 4 * MB),
]  # fmt: skip
"""In the fourth sqrt(layers) is no whole number and inputs are as large as a layer; in the sixth every layer is to be a
segment; in the last nothing fits."""


def _row(case: Case, k: int, divided: Function = math.ceil, inputs: Function = lambda k: k) -> float:
    """Bytes of a row with k segments."""
    _, _, layers, layer_bytes, input_bytes = case
    return inputs(k) * input_bytes + divided(layers / k) * layer_bytes


def _best(case: Case, **parts: Any) -> int:
    return min(range(1, case[2] + 1), key=lambda k: _row(case, k, **parts))


def _root(case: Case) -> float:
    _, _, layers, layer_bytes, input_bytes = case
    return math.sqrt(layers * layer_bytes / input_bytes)


def _last_best(case: Case) -> int:
    return max(range(1, case[2] + 1), key=lambda k: (-_row(case, k), k))


SEARCH = "compare all of 1 .. layers: min(range(1, layers + 1), key=bytes of a row)"
SEGMENTS: list[Slip] = [
    (lambda c: round(math.sqrt(c[2])), "you take the square root of layers: that is best only where an input is as "
     "large as all that a layer keeps. Small inputs are cheap: take more segments", SEARCH),
    (lambda c: min(c[2], round(_root(c))), "you round sqrt(layers * layer_bytes / input_bytes): that is where the "
     "curve without ceil() is lowest; with whole layers it has steps", SEARCH),
    (_root, "this is sqrt(layers * layer_bytes / input_bytes): segments are whole", SEARCH),
    (lambda c: math.sqrt(c[2] * c[4] / c[3]), "the square root is upside down: large inputs ask for few segments",
     SEARCH),
    (lambda c: c[2], "every layer is a segment of its own: then you keep the inputs of all", SEARCH),
    (lambda c: 1, "one segment keeps one input, and then computes all layers again at once: no byte is saved", SEARCH),
    (lambda c: _best(c, divided=math.floor), "you round layers / segments down: the longest segment sets the peak",
     "math.ceil(layers / segments)"),
    (lambda c: min(range(1, c[2]), key=lambda k: _row(c, k)), "you never try as many segments as layers", "range(1, "
     "layers + 1): range() ends before its second number"),
    (_last_best, "several numbers of segments need the same memory, and you take the largest", "the smallest: min() "
     "takes the first"),
    (lambda c: math.ceil(c[2] / _best(c)), "this is the number of layers in a segment", "how many segments are there?"),
]  # fmt: skip


def _rows(row_bytes: Function, rounded: Function = math.floor, fixed: Function = lambda c: c[1], lowest: float = 0
          ) -> Function:  # fmt: skip
    return lambda c: max(lowest, rounded((c[0] - fixed(c)) / row_bytes(c)))


def _right_row(case: Case) -> float:
    return _row(case, _best(case))


TWO_PARTS = "segments * input_bytes + math.ceil(layers / segments) * layer_bytes"
ROWS: list[Slip] = [
    (_rows(lambda c: c[2] * c[3]), "these rows fit without any segments: all layers' activations are in your peak",
     TWO_PARTS),
    (_rows(lambda c: c[2] * c[3] + _best(c) * c[4]), "your peak has the inputs of all segments, and all layers' "
     "activations: backward computes one segment at a time, and frees it", TWO_PARTS),
    (_rows(lambda c: _row(c, _best(c), inputs=lambda k: 0)), "you forget the inputs of the segments", TWO_PARTS),
    (_rows(lambda c: _best(c) * c[4] + c[3]), "backward computes a whole segment again before it can go back through "
     "it, not one layer", TWO_PARTS),
    (_rows(lambda c: _row(c, _best(c), inputs=lambda k: c[2])), "you keep the inputs of all layers, not of segments",
     TWO_PARTS),
    (_rows(lambda c: _best(c) * (c[4] + math.ceil(c[2] / _best(c)) * c[3])), "all segments' activations are in your "
     "peak: backward computes one at a time, and frees it", TWO_PARTS),
    (_rows(_right_row, fixed=lambda c: 0), "you forget fixed_bytes: parameters, gradients and moments are there "
     "whatever the batch", "memory_bytes - fixed_bytes is for rows"),
    (lambda c: math.floor(c[0] / (c[1] + _right_row(c))), "you count fixed_bytes once per row", "once in all"),
    (_rows(_right_row, math.ceil), "you round up: the last row does not fit", "math.floor"),
    (_rows(_right_row, lambda q: q), "rows are whole", "math.floor"),
    (_rows(_right_row, lowest=-math.inf), "a negative number of rows: where not even fixed_bytes fit, it is 0",
     "max(0, ...)"),
    (_right_row, "these are the bytes of a row", "how many rows fit?"),
]  # fmt: skip


def check_largest_batch(f: Function) -> None:
    """Six jobs: small inputs and large ones, numbers of layers that do not divide, one that does not fit at all."""
    got = [_two_numbers(f(*case)) for case in JOBS]
    right = [solution.largest_batch(*case) for case in JOBS]
    if all(round(a) == k and round(b) == rows for (a, b), (rows, k) in zip(got, right, strict=True)):
        raise Mistake("the rows come first, then the segments", "return rows, segments")
    Question("the best number of segments", JOBS, SEGMENTS, _facts, SEARCH).judge(
        [segments for _, segments in got], [segments for _, segments in right]
    )
    Question("the largest batch", JOBS, ROWS, _facts, TWO_PARTS).judge(
        [rows for rows, _ in got], [rows for rows, _ in right]
    )


def _two_numbers(answer: Any) -> tuple[float, float]:
    try:
        rows, segments = answer
    except (TypeError, ValueError):
        raise Mistake(f"you return {answer!r:.60}, not two numbers", "return rows, segments") from None
    return number(rows, "64, 8"), number(segments, "64, 8")


def _facts(case: Case) -> str:
    memory, fixed, layers, layer_bytes, input_bytes = case
    best = solution.largest_batch(*case)[1]
    return (
        f"{layers} layers that keep {layer_bytes / MB:g} MB per row, inputs of {input_bytes / MB:g} MB, "
        f"{fixed / 1e9:g} of {memory / 1e9:g} GB taken: {best} segments, {_row(case, best) / MB:g} MB per row"
    )


LIMIT_S = 15.0
"""Each check takes a second or two."""

EXERCISES = {
    "05.1": Exercise("checkpoints that survive", check_checkpoints, solution.Checkpoints, LIMIT_S),
    "05.2": Exercise("recomputation by hand", check_checkpointed, solution.checkpointed, LIMIT_S),
    "05.3": Exercise("the largest batch, and the segments for it", check_largest_batch, solution.largest_batch),
    "05.4": Exercise("a state from which training goes on exactly", check_resumable, solution.Resumable, LIMIT_S),
}
