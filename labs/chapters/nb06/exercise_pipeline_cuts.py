"""Checker of exercise 06.3: cuts of small chains against every other way to cut them, and a chain too long for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, islice, pairwise
from operator import index
from typing import Any

from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_pipeline_threads import in_time
from labs.kit.check import Mistake

Function = Callable[..., Any]
Case = tuple[tuple[float, ...], int]
CASES: list[Case] = [
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
LONG: Case = (tuple(1.0 + (37 * k) % 23 / 7 for k in range(25)), 13)
"""C(24, 12) = 2.7 million ways: too many to try, few enough that a list of them all still fits into memory."""
LIMIT_S = 1.0


def check_cuts(f: Function) -> None:
    """Small chains, all ways known; then a long one, which needs a search that does not try them all."""
    late = Mistake(f"your code did not finish within {LIMIT_S:g} s", "look for a loop that never ends")
    answers = in_time(lambda: [_indices(f(list(layer_s), stages), stages) for layer_s, stages in CASES], LIMIT_S, late)
    wrong = [(c, a) for c, a in zip(CASES, answers, strict=True) if _invalid(c, a) or _slower(c, a)]
    if wrong:
        for slip, what, hint in SLIPS:
            if [slip(list(layer_s), stages) for layer_s, stages in CASES] == answers:
                raise Mistake(f"{what}: {_told(*wrong[0])}", hint)
        raise Mistake(_told(*wrong[0]), BEGIN if _invalid(*wrong[0]) else SEARCH)
    _check_long(f)


def _check_long(f: Function) -> None:
    layer_s, stages = LONG
    late = Mistake(
        f"right for short chains, but {len(layer_s)} layers in {stages} stages took more than {LIMIT_S:g} s: there are "
        "2.7 million ways to cut them, and 10^10 for 96 layers in 8 stages",
        "the best way to cut what is left depends on the layer where it begins and on the stages left: compute it once "
        "for each such pair, for example with functools.cache",
    )
    answer = _indices(in_time(lambda: f(list(layer_s), stages), LIMIT_S, late), stages)
    if _invalid(LONG, answer) or _slower(LONG, answer):
        raise Mistake(_told(LONG, answer), SEARCH)


SEARCH = "the slowest stage sets the pace: of all ways to cut, take the one whose largest stage sum is smallest"


def _indices(answer: Any, stages: int) -> list[int]:
    """The answer as plain whole numbers."""
    try:
        found = list(islice(answer, 1000))  # an endless generator would fill the memory, and no time limit stops that
    except TypeError:
        raise Mistake(f"you return {answer!r:.60}, not a list of cuts", "for two stages such as [3]") from None
    if any(isinstance(a, list | tuple | range) for a in found):
        raise Mistake(
            f"for {stages} stages you return {found!r:.60}: these are the stages themselves",
            "the number of the layer with which each stage but the first begins",
        )
    try:
        return [index(a) for a in found]
    except TypeError:
        raise Mistake(f"{found!r:.60} are no numbers of layers", "whole numbers, counted from 0") from None


def _invalid(case: Case, cut: Sequence[int]) -> str:
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


def _slower(case: Case, cut: Sequence[int]) -> bool:
    return max(_sums(case[0], cut)) > max(_sums(case[0], solution.cuts(*case))) + 1e-9


def _sums(layer_s: Sequence[float], cut: Sequence[int]) -> list[float]:
    return [sum(layer_s[a:b]) for a, b in pairwise([0, *cut, len(layer_s)])]


def _told(case: Case, cut: Sequence[int]) -> str:
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


def _ways(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, layers), stages - 1)


def _by(objective: Callable[[list[float]], float]) -> Function:
    """The cuts with the least `objective` of the stages' sums."""

    def choose(layer_s: list[float], stages: int) -> list[int]:
        return list(min(_ways(len(layer_s), stages), key=lambda cut: objective(_sums(layer_s, cut))))

    return choose


def _equal(rounded: Callable[[int, int], int]) -> Function:
    """As many layers in every stage; `rounded(k * layers, stages)` is where stage k begins."""
    return lambda layer_s, stages: [rounded(k * len(layer_s), stages) for k in range(1, stages)]


def _equal_with_the_rest_first(layer_s: list[float], stages: int) -> list[int]:
    few, more = divmod(len(layer_s), stages)
    return list(accumulate(few + (k < more) for k in range(stages - 1)))


def _steps(size: Callable[[int, int], int]) -> Function:
    return lambda layer_s, stages: [k * size(len(layer_s), stages) for k in range(1, stages)]


def _greedy(before: bool, share_of_rest: bool = False) -> Function:
    """Close a stage when it reaches the average of all (or of what is left), or `before` it would pass it."""

    def fill(layer_s: list[float], stages: int) -> list[int]:
        cut, now, left, target = [], 0.0, sum(layer_s), sum(layer_s) / stages
        for k, seconds in enumerate(layer_s):
            full = now + seconds > target if before else now >= target
            if now and full and len(cut) < stages - 1:
                cut.append(k)
                left, now = left - now, 0.0
                target = left / (stages - len(cut)) if share_of_rest else target
            now += seconds
        return cut

    return fill


def _nearest_to_shares(layer_s: list[float], stages: int) -> list[int]:
    """Each cut where the running sum is nearest to its share of the total."""
    until = list(accumulate(layer_s, initial=0.0))
    return [min(range(len(until)), key=lambda c: abs(until[c] - k * until[-1] / stages)) for k in range(1, stages)]


def _reaches_its_share(layer_s: list[float], stages: int) -> list[int]:
    """Each cut after the layer with which the running sum reaches its share of the total."""
    until = list(accumulate(layer_s))
    return [next(k for k, s in enumerate(until) if s >= i * until[-1] / stages) + 1 for i in range(1, stages)]


def _sizes(layer_s: list[float], stages: int) -> list[int]:
    return [b - a for a, b in pairwise([0, *solution.cuts(layer_s, stages), len(layer_s)])]


def _sorted(reverse: bool) -> Function:
    return lambda layer_s, stages: solution.cuts(sorted(layer_s, reverse=reverse), stages)


BEGIN = "return the number of the layer with which each stage but the first begins, counted from 0"
EQUAL = "you give every stage as many layers, whatever they cost"
FILL = "you fill one stage after the other up to the average"
SHARES = "you cut where the running sum is at its share of the total"
SORTED = "you sort the layers before you cut: a stage must hold layers that follow each other in the model"
SLIPS: list[tuple[Function, str, str]] = [
    (lambda c, p: [i - 1 for i in solution.cuts(c, p)], "you return the last layer of each stage", BEGIN),
    (lambda c, p: [i + 1 for i in solution.cuts(c, p)], "you count layers from 1", BEGIN),
    (lambda c, p: [0, *solution.cuts(c, p)], "you begin with 0", "the first stage always begins there: leave it out"),
    (lambda c, p: [*solution.cuts(c, p), len(c)], "you end with the number of layers", "no stage begins there"),
    (lambda c, p: [0, *solution.cuts(c, p), len(c)], "you begin with 0 and end with the number of layers",
     "leave out both: every number is a place to cut"),
    (_sizes, "you return how many layers each stage has", BEGIN),
    (lambda c, p: solution.cuts(c, min(2, len(c))), "you always cut in two", "there are `stages` stages"),
    (_equal(lambda a, b: a // b), EQUAL, SEARCH),
    (_equal(lambda a, b: round(a / b)), EQUAL, SEARCH),
    (_equal(lambda a, b: -(-a // b)), EQUAL, SEARCH),
    (_equal_with_the_rest_first, EQUAL, SEARCH),
    (_steps(lambda n, p: n // p), EQUAL, SEARCH),
    (_steps(lambda n, p: -(-n // p)), EQUAL, SEARCH),
    (_greedy(before=False), f"{FILL}, and a bit over", SEARCH),
    (_greedy(before=True), f"{FILL}, and what never fitted ends up in the last one", SEARCH),
    (_greedy(before=False, share_of_rest=True), "you fill one stage after the other up to its share of what is left",
     SEARCH),
    (_greedy(before=True, share_of_rest=True), "you fill one stage after the other, below its share of what is left",
     SEARCH),
    (_nearest_to_shares, f"{SHARES}, as near as can be", SEARCH),
    (_reaches_its_share, f"{SHARES}, or just above", SEARCH),
    (_sorted(reverse=True), SORTED, SEARCH),
    (_sorted(reverse=False), SORTED, SEARCH),
    (_by(lambda sums: sum(s * s for s in sums)), "you minimise the sum of squares", SEARCH),
    (_by(lambda sums: max(sums) - min(sums)), "you minimise the difference between slowest and fastest stage: a "
     "faster stage costs nothing, it only waits", SEARCH),
    (_by(lambda sums: sum(abs(s - sum(sums) / len(sums)) for s in sums)), "you minimise the distance of all stages "
     "from their mean", SEARCH),
    (_by(lambda sums: -min(sums)), "you make the fastest stage as slow as can be", SEARCH),
    (_by(lambda sums: -max(sums)), "you make the slowest stage as slow as can be", "min(), not max(), of the ways"),
    (_by(lambda sums: sum(sums)), "you minimise the sum of all stages, which is the same for every way to cut", SEARCH),
]  # fmt: skip
