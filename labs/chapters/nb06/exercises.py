"""Exercises of notebook 06: a pipeline's stage by hand, its best micro-batches, where to cut, tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_cuts import check_cuts
from labs.chapters.nb06.exercise_pipeline import check_pipeline_step
from labs.chapters.nb06.exercise_tensor import check_parallel_mlp
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake
from labs.kit.slips import Question, Slip

Function = Callable[..., Any]

# -- 06.2: bubble and overhead

Case = tuple[float, int, float, int]
STEPS: list[Case] = [
    (0.8, 2, 2e-3, 64), (2.4, 4, 1e-3, 512), (0.5, 8, 4e-5, 48), (0.841, 2, 0.2, 32), (3.0, 3, 0.3, 96),
    (0.2, 1, 1e-3, 16), (0.03, 4, 0.5, 8),
]  # fmt: skip
"""(work_s, stages, overhead_s, rows). In turn: two that are plain; cheap micro-batches, of which there are not enough
rows; one where the nearest whole number is not the best; few micro-batches; a single stage; overhead above all."""


def _step(c: Case, m: float, *, turns: Function = lambda m, p: m + p - 1, share: Function = lambda m, p: m * p,
          overhead: float = 1) -> float:  # fmt: skip
    """Seconds of a step, with faults."""
    work, p, c_s, _ = c
    return turns(m, p) * (work / share(m, p) + overhead * c_s)


def _best(c: Case, step: Function = _step, rows: Function = lambda c: c[3]) -> int:
    return min(range(1, rows(c) + 1), key=lambda m: step(c, m))


def _least(c: Case, factor: Function = lambda p: (p - 1) / p) -> float:
    return math.sqrt(factor(c[1]) * c[0] / c[2])


def _whole(rounded: Function, factor: Function = lambda p: (p - 1) / p) -> Function:
    return lambda c: min(c[3], max(1, rounded(_least(c, factor))))


def _powers(c: Case) -> int:
    return min((2**k for k in range(c[3].bit_length())), key=lambda m: _step(c, m))


def _divisors(c: Case) -> int:
    return min((m for m in range(1, c[3] + 1) if c[3] % m == 0), key=lambda m: _step(c, m))


TURNS = "m + p - 1 turns, each of work_s / (p m) + overhead_s"
ROOT = "sqrt((p - 1) work_s / (p overhead_s)) is where the derivative by m is zero"
NEIGHBOURS = "compare step_s of the whole numbers below and above the root, or of all from 1 to rows"
MICRO_BATCHES: list[Slip] = [
    (lambda c: c[3], "you take one row per micro-batch: the bubble is smallest then, but every turn pays overhead_s",
     "the least step_s, not the least idle share"),
    (lambda c: c[1], "you take as many micro-batches as stages", NEIGHBOURS),
    (lambda c: min(4 * c[1], c[3]), "you take 4 per stage, a rule of thumb: work and overhead decide", NEIGHBOURS),
    (_least, "this is the root itself: micro-batches are whole, at least 1 and at most rows", NEIGHBOURS),
    (lambda c: min(max(1.0, _least(c)), c[3]), "this is the root, not a whole number", NEIGHBOURS),
    (_whole(round), "you round the root to the nearest whole number: the curve is steeper on its left, so that the "
     "best may be the other neighbour", NEIGHBOURS),
    (_whole(math.floor), "you round the root down", NEIGHBOURS),
    (_whole(math.ceil), "you round the root up", NEIGHBOURS),
    (lambda c: max(1, round(_least(c))), "more micro-batches than rows", "at most rows"),
    (lambda c: _best(c, rows=lambda c: 10**4), "more micro-batches than rows", "at most rows"),
    (lambda c: min(c[3], round(_least(c))), "0 micro-batches, where one stage or a large overhead asks for one",
     "at least 1"),
    (_whole(round, lambda p: p - 1), "your root has all of work_s: a stage has a p-th of it", ROOT),
    (lambda c: _best(c, lambda c, m: _step(c, m, share=lambda m, p: m)), "in your turns every stage computes the whole "
     "model: a stage has a p-th of work_s", TURNS),
    (_whole(round, lambda p: 1), "you have p where p - 1 belongs: a step has m + p - 1 turns", ROOT),
    (_powers, "you take a power of two", NEIGHBOURS),
    (_divisors, "you take only numbers that divide rows; here all from 1 to rows count", NEIGHBOURS),
    (lambda c: 1, "one micro-batch is the naive split: only one stage works at a time", NEIGHBOURS),
    (lambda c: math.ceil(c[3] / _best(c)), "this is the number of rows in a micro-batch", "how many are there?"),
    (lambda c: _best(c) - 1, "one too few: does your search begin at 0?", "range(1, rows + 1)"),
]  # fmt: skip


def _at_best(step: Function) -> Function:
    return lambda c: step(c, _best(c))


STEP: list[Slip] = [
    (_at_best(lambda c, m: _step(c, m, turns=lambda m, p: m)), "your step has m turns: you forget the p - 1 in which "
     "the pipeline fills and drains", TURNS),
    (_at_best(lambda c, m: _step(c, m, turns=lambda m, p: m + p)), "your step has m + p turns: the first stage has "
     "begun already when the others wait for p - 1", TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0)), "micro-batches cost nothing in your step", TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0) + c[2]), "you pay overhead_s once per step: every turn pays it",
     TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0) + m * c[2]), "you pay overhead_s in m turns: in the p - 1 in which "
     "the pipeline fills it is paid as well", TURNS),
    (_at_best(lambda c, m: _step(c, m, share=lambda m, p: m)), "every stage computes the whole model in your step",
     "a stage has a p-th of work_s"),
    (_at_best(lambda c, m: _step(c, m, share=lambda m, p: p)), "every turn computes the whole batch in your step",
     "a micro-batch is an m-th of it"),
    (lambda c: c[0] / c[1], "this is the ideal, work_s / p: no bubble, no overhead", TURNS),
    (lambda c: c[0], "this is one GPU's step", TURNS),
    (_at_best(lambda c, m: c[0] / c[1] + m * c[2]), "no bubble: as if all stages began at once", TURNS),
    (_at_best(lambda c, m: c[0] / (c[1] * m) + c[2]), "this is one turn", "how many are there?"),
    (_at_best(lambda c, m: (c[1] - 1) * (c[0] / (c[1] * m) + c[2])), "this is the bubble alone, p - 1 turns", TURNS),
    (_at_best(lambda c, m: c[0] / _step(c, m)), "this is the speed-up over one GPU", "return the seconds"),
    (_at_best(lambda c, m: 1e3 * _step(c, m)), "these are milliseconds", "return seconds"),
    (lambda c: _step(c, 1), "this is the step with one micro-batch", "with the best number of them"),
    (lambda c: _step(c, c[3]), "this is the step with one row per micro-batch", "with the best number of them"),
    (lambda c: _step(c, max(1e-9, _least(c))), "this is the step at the root", "with the whole number that you return"),
]  # fmt: skip
IDLE = "of m + p - 1 turns a stage works in m: (p - 1) / (m + p - 1)"
IDLE_SHARE: list[Slip] = [
    (_at_best(lambda c, m: (c[1] - 1) / m), "this is the bubble relative to the time in which a stage works, as in "
     "Megatron's papers", IDLE),
    (_at_best(lambda c, m: m / (m + c[1] - 1)), "this is the share in which a stage works", IDLE),
    (_at_best(lambda c, m: c[1] / (m + c[1])), "p for p - 1: with one stage nothing is idle", IDLE),
    (_at_best(lambda c, m: c[1] / (m + c[1] - 1)), "p for p - 1 above the line: with one stage nothing is idle", IDLE),
    (_at_best(lambda c, m: (c[1] - 1) / (m + c[1])), "p for p - 1 below the line", IDLE),
    (lambda c: (c[1] - 1) / c[1], "this is the naive split's: one of p stages works", IDLE),
    (lambda c: (c[1] - 1) / (c[3] + c[1] - 1), "this is with one row per micro-batch", IDLE),
    (_at_best(lambda c, m: 1 - c[0] / c[1] / _step(c, m)), "you count overhead as idle, too: a stage is busy with it",
     IDLE),
    (_at_best(lambda c, m: 100 * (c[1] - 1) / (m + c[1] - 1)), "this is in percent", "a share: 1 for all"),
    (_at_best(lambda c, m: (c[1] - 1) / (m + c[1] - 1) * _step(c, m)), "these are seconds", "a share of the step"),
    (_at_best(lambda c, m: c[1] * (c[1] - 1) / (m + c[1] - 1)), "you add up all stages", "the share of one"),
]  # fmt: skip


def check_best_pipeline(f: Function) -> None:
    """Seven pipelines, from one stage to eight, with cheap and with dear micro-batches."""
    got = [_three_numbers(f(*case)) for case in STEPS]
    right = [solution.best_pipeline(*case) for case in STEPS]
    questions = (("the best number of micro-batches", MICRO_BATCHES, NEIGHBOURS), ("step_s", STEP, TURNS),
                 ("idle_share", IDLE_SHARE, IDLE))  # fmt: skip
    for k, (name, slips, hint) in enumerate(questions):
        Question(name, STEPS, slips, _facts, hint).judge([a[k] for a in got], [r[k] for r in right])


def _three_numbers(answer: Any) -> tuple[float, ...]:
    try:
        if isinstance(answer, dict):  # it would unpack into its keys
            raise TypeError
        micro_batches, step_s, idle_share = answer
    except (TypeError, ValueError):
        raise Mistake(f"you return {answer!r:.60}, not three numbers",
                      "return micro_batches, step_s, idle_share") from None  # fmt: skip
    return number(micro_batches, "8"), number(step_s, "0.3"), number(idle_share, "0.1")


def _facts(case: Case) -> str:
    work, p, c_s, rows = case
    m = solution.best_pipeline(*case)[0]
    near = ", ".join(f"{_step(case, i):.5g} s with {i}" for i in range(max(1, m - 1), min(rows, m + 1) + 1))
    return f"work_s={work:g}, stages={p}, overhead_s={c_s:g}, rows={rows} (a step takes {near})"


EXERCISES = {
    "06.1": Exercise("a pipeline's stage, micro-batch by micro-batch", check_pipeline_step, solution.pipeline_step),
    "06.2": Exercise("the best number of micro-batches", check_best_pipeline, solution.best_pipeline),
    "06.3": Exercise("where to cut the model", check_cuts, solution.cuts),
    "06.4": Exercise("tensor parallelism by hand", check_parallel_mlp, solution.parallel_mlp),
}
