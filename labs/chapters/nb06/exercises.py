"""Exercises of notebook 06: the best micro-batches, where to cut; 06.1 and 06.4 have files of their own."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, islice, pairwise
from operator import index
from typing import Any

from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_pipeline import check_pipeline_step
from labs.chapters.nb06.exercise_tensor import check_parallel_mlp
from labs.kit.answers import Question, Slip, number, on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.failure import RankFailed

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


TURNS = "m + p - 1 turns, each of work_s / (p m) + overhead_s"
ROOT = "sqrt((p - 1) work_s / (p overhead_s)) is where the derivative by m is zero"
NEIGHBOURS = "compare step_s of the whole numbers below and above the root, or of all from 1 to rows"
MICRO_BATCHES: list[Slip] = [
    (lambda c: c[3], "you take one row per micro-batch: the bubble is smallest then, but every turn pays overhead_s",
     "the least step_s, not the least idle share"),
    (lambda c: c[1], "you take as many micro-batches as stages", NEIGHBOURS),
    (lambda c: min(4 * c[1], c[3]), "you take 4 per stage, a rule of thumb: work and overhead decide", NEIGHBOURS),
    (lambda c: min(max(1.0, _least(c)), c[3]), "this is the root, not a whole number", NEIGHBOURS),
    (_whole(round), "you round the root to the nearest whole number: the curve is steeper on its left, so that the "
     "best may be the other neighbour", NEIGHBOURS),
    (lambda c: _best(c, rows=lambda c: 10**4), "more micro-batches than rows", "at most rows"),
    (lambda c: min(c[3], round(_least(c))), "0 micro-batches, where one stage or a large overhead asks for one",
     "at least 1"),
    (_whole(round, lambda p: p - 1), "your root has all of work_s: a stage has a p-th of it", ROOT),
    (lambda c: _best(c, lambda c, m: _step(c, m, share=lambda m, p: m)), "in your turns every stage computes the whole "
     "model: a stage has a p-th of work_s", TURNS),
    (_whole(round, lambda p: 1), "you have p where p - 1 belongs: a step has m + p - 1 turns", ROOT),
    (lambda c: 1, "one micro-batch is the naive split: only one stage works at a time", NEIGHBOURS),
]  # fmt: skip


def _at_best(step: Function) -> Function:
    return lambda c: step(c, _best(c))


STEP: list[Slip] = [
    (_at_best(lambda c, m: _step(c, m, turns=lambda m, p: m)), "your step has m turns: you forget the p - 1 in which "
     "the pipeline fills and drains", TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0)), "micro-batches cost nothing in your step", TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0) + c[2]), "you pay overhead_s once per step: every turn pays it",
     TURNS),
    (_at_best(lambda c, m: _step(c, m, overhead=0) + m * c[2]), "you pay overhead_s in m turns: in the p - 1 in which "
     "the pipeline fills it is paid as well", TURNS),
    (_at_best(lambda c, m: _step(c, m, share=lambda m, p: m)), "every stage computes the whole model in your step",
     "a stage has a p-th of work_s"),
    (lambda c: c[0] / c[1], "this is the ideal, work_s / p: no bubble, no overhead", TURNS),
    (_at_best(lambda c, m: c[0] / (c[1] * m) + c[2]), "this is one turn", "how many are there?"),
    (_at_best(lambda c, m: c[0] / _step(c, m)), "this is the speed-up over one GPU", "return the seconds"),
    (_at_best(lambda c, m: 1e3 * _step(c, m)), "these are milliseconds", "return seconds"),
]  # fmt: skip
IDLE = "of m + p - 1 turns a stage works in m: (p - 1) / (m + p - 1)"
IDLE_SHARE: list[Slip] = [
    (_at_best(lambda c, m: (c[1] - 1) / m), "this is the bubble relative to the time in which a stage works, as in "
     "Megatron's papers", IDLE),
    (_at_best(lambda c, m: m / (m + c[1] - 1)), "this is the share in which a stage works", IDLE),
    (_at_best(lambda c, m: c[1] / (m + c[1] - 1)), "p for p - 1 above the line: with one stage nothing is idle", IDLE),
    (lambda c: (c[1] - 1) / c[1], "this is the naive split's: one of p stages works", IDLE),
    (_at_best(lambda c, m: 1 - c[0] / c[1] / _step(c, m)), "you count overhead as idle, too: a stage is busy with it",
     IDLE),
    (_at_best(lambda c, m: 100 * (c[1] - 1) / (m + c[1] - 1)), "this is in percent", "a share: 1 for all"),
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


# -- 06.3: where to cut


# 06.3, the task: seconds of the layers, and a number of stages

Chain = tuple[tuple[float, ...], int]
CASES: list[Chain] = [
    ((2.0, 3.0, 1.0, 4.0, 2.0, 7.0, 1.0, 5.0), 2),
    ((9.0, 1.0, 1.0, 2.0, 1.0, 1.0, 3.0), 3),
    ((1.0, 2.0, 2.0, 1.0, 8.0, 2.0, 1.0, 6.0, 3.0), 3),
    ((0.5, 4.0, 0.25, 4.0, 0.5, 3.0, 5.0, 1.5, 2.5, 6.0), 4),
    ((1.0, 6.0, 2.0, 1.0, 1.0, 12.0), 3),
    ((1.0, 9.0, 4.0, 5.0, 4.0, 2.0), 4),
    ((5.0, 5.0, 1.0, 10.0, 1.0, 12.0, 1.0), 4),
    ((3.0, 1.0, 2.0), 3),
    ((2.0, 5.0, 4.0), 1),
    ((4.0, 3.0, 1.0, 6.0, 2.0, 5.0, 1.0, 1.0, 7.0, 2.0, 3.0), 5),
]
"""(layer_s, stages), on which each of the slips below is wrong somewhere; also one stage only, and a layer for each."""
LONG: Chain = (tuple(1.0 + (37 * k) % 23 / 7 for k in range(25)), 13)
"""C(24, 12) = 2.7 million ways: too many to try, few enough that a list of them all still fits into memory."""
LIMIT_S = 1.0

# 06.3, the run: in a process of its own


def check_cuts(f: Function) -> None:
    """Small chains, all ways known; then a long one, which needs a search that does not try them all."""
    try:
        *answers, long_answer = _answers(f, [*CASES, LONG])
    except Late:
        _check_short(
            _answers(f, CASES, Mistake(f"your code did not finish within {LIMIT_S:g} s", "a loop never ends?"))
        )
        raise Mistake(
            f"right for short chains, but {len(LONG[0])} layers in {LONG[1]} stages took more than {LIMIT_S:g} s: "
            "there are 2.7 million ways to cut them, and 10^10 for 96 layers in 8 stages",
            "the best way to cut what is left depends on the layer where it begins and on the stages left: compute it "
            "once for each such pair, for example with functools.cache",
        ) from None
    _check_short(answers)
    if _wrong(LONG, cut := _indices(*long_answer)):
        raise Mistake(_told(LONG, cut), SEARCH)


class Late(Exception):
    """The answers took too long."""


Answer = tuple[Any, str, int]
"""The answer as a list, or None if it is none; as text; the number of stages."""


def _answers(f: Function, cases: Sequence[Chain], late: Exception | None = None) -> list[Answer]:
    try:
        return on_ranks(_answer_in_time, 1, f, cases, when="")[0]
    except RankFailed as e:
        if "SIGPROF" not in str(e):
            raise
        raise late or Late from None


def _answer_in_time(f: Function, cases: Sequence[Chain]) -> list[Answer]:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the system then ends this process, also inside of a C function
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # of computing: a busy machine does not count
    answers = [_as_list(f(list(layer_s), stages), stages) for layer_s, stages in cases]
    signal.setitimer(signal.ITIMER_PROF, 0)
    return answers


def _as_list(answer: Any, stages: int) -> Answer:
    try:
        found = list(islice(answer, 1000))  # an endless generator would fill the memory
    except TypeError:
        return None, f"{answer!r:.60}", stages
    if any(isinstance(a, list | tuple | range) for a in found):
        return found, f"{found!r:.60}", stages
    try:
        return [index(a) for a in found], f"{found!r:.60}", stages
    except TypeError:
        return [], f"{found!r:.60}", stages


# 06.3, the checks


def _check_short(answers: Sequence[Answer]) -> None:
    cuts = [_indices(*answer) for answer in answers]
    wrong = [(case, cut) for case, cut in zip(CASES, cuts, strict=True) if _wrong(case, cut)]
    if not wrong:
        return
    for slip, what, hint in SLIPS:
        if [slip(list(layer_s), stages) for layer_s, stages in CASES] == cuts:
            raise Mistake(f"{what}: {_told(*wrong[0])}", hint)
    raise Mistake(_told(*wrong[0]), BEGIN if _invalid(*wrong[0]) else SEARCH)


def _indices(found: list[Any] | None, text: str, stages: int) -> list[int]:
    """The answer as plain whole numbers."""
    if found is None:
        raise Mistake(f"you return {text}, not a list of cuts", "for two stages such as [3]")
    if any(isinstance(a, list | tuple | range) for a in found):
        raise Mistake(f"for {stages} stages you return {text}: these are the stages themselves",
                      "the number of the layer with which each stage but the first begins")  # fmt: skip
    if not found and text != "[]":
        raise Mistake(f"{text} are no numbers of layers", "whole numbers, counted from 0")
    return found


def _wrong(case: Chain, cut: Sequence[int]) -> bool:
    return bool(_invalid(case, cut)) or _slower(case, cut)


def _invalid(case: Chain, cut: Sequence[int]) -> str:
    """Why these are no cuts at all, in words; "" if they are."""
    layer_s, stages = case
    if len(cut) != stages - 1:
        return f"{stages} stages need {stages - 1} cut{'s' * (stages != 2)}, and you return {list(cut)}"
    for stage, (begin, end) in enumerate(pairwise([0, *cut, len(layer_s)])):
        if not 0 <= begin <= len(layer_s):
            return f"your cuts are {list(cut)}, and there are {len(layer_s)} layers"
        if end <= begin:
            return f"with cuts {list(cut)} stage {stage} of {stages} would be empty"
    return ""


def _slower(case: Chain, cut: Sequence[int]) -> bool:
    return max(_sums(case[0], cut)) > max(_sums(case[0], solution.cuts(*case))) + 1e-9


def _sums(layer_s: Sequence[float], cut: Sequence[int]) -> list[float]:
    return [sum(layer_s[a:b]) for a, b in pairwise([0, *cut, len(layer_s)])]


def _told(case: Chain, cut: Sequence[int]) -> str:
    """The case and what is wrong with the answer, with the sums of all stages."""
    layer_s, stages = case
    layers = ", ".join(f"{s:g}" for s in layer_s) if len(layer_s) < 20 else f"{len(layer_s)} layers"
    if problem := _invalid(case, cut):
        return f"layers of {layers} s: {problem}"
    best = solution.cuts(*case)
    own, other = (" + ".join(f"{s:.4g}" for s in _sums(layer_s, c)) for c in (cut, best))
    slow, fast = (max(_sums(layer_s, c)) for c in (cut, best))
    return (f"layers of {layers} s in {stages} stages: your cuts {list(cut)} make stages of {own} s, the slowest "
            f"{slow:.4g} s; there is a way with {other} s, the slowest {fast:.4g} s")  # fmt: skip


# 06.3, what typical mistakes give


def _by(objective: Callable[[list[float]], float]) -> Function:
    """The cuts with the least `objective` of the stages' sums."""

    def choose(layer_s: list[float], stages: int) -> list[int]:
        ways = combinations(range(1, len(layer_s)), stages - 1)
        return list(min(ways, key=lambda cut: objective(_sums(layer_s, cut))))

    return choose


def _greedy(before: bool) -> Function:
    """Close a stage when it reaches the average of all, or `before` it would pass it."""

    def fill(layer_s: list[float], stages: int) -> list[int]:
        cut, now, average = [], 0.0, sum(layer_s) / stages
        for k, seconds in enumerate(layer_s):
            full = now + seconds > average if before else now >= average
            if now and full and len(cut) < stages - 1:
                cut.append(k)
                now = 0.0
            now += seconds
        return cut

    return fill


def _nearest_to_shares(layer_s: list[float], stages: int) -> list[int]:
    """Each cut where the running sum is nearest to its share of the total."""
    until = list(accumulate(layer_s, initial=0.0))
    return [min(range(len(until)), key=lambda c: abs(until[c] - k * until[-1] / stages)) for k in range(1, stages)]


BEGIN = "return the number of the layer with which each stage but the first begins, counted from 0"
SEARCH = "the slowest stage sets the pace: of all ways to cut, take the one whose largest stage sum is smallest"
EQUAL = "you give every stage as many layers, whatever they cost"
FILL = "you fill one stage after the other up to the average"
SLIPS: list[tuple[Function, str, str]] = [
    (lambda c, p: [i - 1 for i in solution.cuts(c, p)], "you return the last layer of each stage", BEGIN),
    (lambda c, p: [i + 1 for i in solution.cuts(c, p)], "you count layers from 1", BEGIN),
    (lambda c, p: [0, *solution.cuts(c, p)], "you begin with 0", "the first stage always begins there: leave it out"),
    (lambda c, p: [*solution.cuts(c, p), len(c)], "you end with the number of layers", "no stage begins there"),
    (lambda c, p: [b - a for a, b in pairwise([0, *solution.cuts(c, p), len(c)])], "you return how many layers each "
     "stage has", BEGIN),
    (lambda c, p: solution.cuts(c, min(2, len(c))), "you always cut in two", "there are `stages` stages"),
    (lambda c, p: [k * len(c) // p for k in range(1, p)], EQUAL, SEARCH),
    (lambda c, p: [round(k * len(c) / p) for k in range(1, p)], EQUAL, SEARCH),
    (_greedy(before=False), f"{FILL}, and a bit over", SEARCH),
    (_greedy(before=True), f"{FILL}, and what never fitted ends up in the last one", SEARCH),
    (_nearest_to_shares, "you cut where the running sum is at its share of the total, as near as can be", SEARCH),
    (lambda c, p: solution.cuts(sorted(c, reverse=True), p), "you sort the layers before you cut: a stage must hold "
     "layers that follow each other in the model", SEARCH),
    (_by(lambda sums: sum(s * s for s in sums)), "you minimise the sum of squares", SEARCH),
    (_by(lambda sums: max(sums) - min(sums)), "you minimise the difference between slowest and fastest stage: a "
     "faster stage costs nothing, it only waits", SEARCH),
    (_by(lambda sums: max(sums[:-1], default=0)), "you leave the last stage out of the comparison", SEARCH),
    (_by(lambda sums: -min(sums)), "you make the fastest stage as slow as can be", SEARCH),
    (_by(lambda sums: -max(sums)), "you make the slowest stage as slow as can be", "min(), not max(), of the ways"),
]  # fmt: skip


EXERCISES = {
    "06.1": Exercise("a pipeline's stage, micro-batch by micro-batch", check_pipeline_step, solution.pipeline_step),
    "06.2": Exercise("the best number of micro-batches", check_best_pipeline, solution.best_pipeline),
    "06.3": Exercise("where to cut the model", check_cuts, solution.cuts),
    "06.4": Exercise("tensor parallelism by hand", check_parallel_mlp, solution.parallel_mlp),
}
