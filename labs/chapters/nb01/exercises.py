"""Exercises of notebook 01: 01.2, a comparison; the others have files of their own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from labs.chapters.nb01 import solutions as solution
from labs.chapters.nb01.exercise_benchmark import DriftingMachine, Run, Version, check_benchmark
from labs.chapters.nb01.exercise_epoch import check_epoch
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake
from labs.kit.measure import Estimate, differs, estimate

# -- 01.2: which of two versions is faster


Function = Callable[..., Any]
VERDICTS = ("b is faster", "b is slower", "no difference")


def check_compare(f: Function) -> None:
    """Four machines: the same version twice, clear differences, and a small one that a quiet machine shows."""
    cases = ((1.0, 0.03, 0.08, 24), (1.15, 0.02, 0.05, 30), (0.84, 0.02, 0.05, 21), (1.03, 0.002, 0.004, 20))
    for seed, (slower, noise, second_slower, pairs) in enumerate(cases):
        machine = DriftingMachine(round(0.95 * pairs), second_slower, noise, seed)
        answer = f(Version("a", 0.2), Version("b", 0.2 * slower), machine.seconds_of, pairs)
        names = [r.name for r in machine.runs]
        _check_counts(names, pairs)
        _check_order(names, machine, slower)
        ratios, verdict = _two(answer, slower)
        _check_ratios(ratios, machine)
        _check_verdict(verdict, estimate(ratios), slower)


def _check_counts(names: list[str], pairs: int) -> None:
    if (n := (names.count("a"), names.count("b"))) != (pairs, pairs):
        more = min(n) >= pairs
        raise Mistake(
            f"for pairs={pairs} you ran a {n[0]} and b {n[1]} times",
            "each version runs once per pair and no more: who picks among runs picks the result"
            if more
            else "each version runs once per pair, in all pairs that were asked for",
        )


def _check_order(names: list[str], machine: DriftingMachine, slower: float) -> None:
    if names == sorted(names) or names == sorted(names, reverse=True):
        a, b = (statistics.median(r.seconds for r in machine.runs if r.name == name) for name in "ab")
        raise Mistake(
            f"all runs of {names[0]} came before all of {names[-1]}, and in between a neighbour arrived: the medians' "
            f"ratio is {b / a:.2f}, in truth it is {slower:.2f}",
            "run a and b in turn: both see the same machine",
        )
    firsts, pairs = names[::2], len(names) // 2
    if any(x == y for x, y in zip(firsts, names[1::2], strict=True)):
        raise Mistake(
            "a pair is not one run of a and one of b, one right after the other",
            "a b, b a, a b, ...: runs 1 and 2 are a pair, then 3 and 4",
        )
    if min(firsts.count("a"), firsts.count("b")) < pairs / 8:
        late = "b" if firsts.count("a") > firsts.count("b") else "a"
        raise Mistake(
            f"{late} was the second of its pair {max(map(firsts.count, 'ab'))} of {pairs} times, and whoever "
            f"comes second is slower on this machine",
            "let them take turns: a b, b a, a b, ...",
        )


def _two(answer: Any, slower: float) -> tuple[list[float], str]:
    """(ratios, verdict) of a learner's answer; Mistake if it does not hold both."""
    words = ", ".join(f'"{v}"' for v in VERDICTS)
    if isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[0], str):
        raise Mistake("you return the verdict first, then the ratios", "return ratios, verdict")
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], str):
        what = f"a list of {len(answer)}" if isinstance(answer, list) else f"{answer!r:.60}"
        raise Mistake(f"you return {what}, not two things", f"return ratios, verdict; the verdict is one of {words}")
    ratios, verdict = answer
    if not hasattr(ratios, "__len__"):
        single = number(ratios, "a list of ratios")
        raise Mistake(
            f"{single:.3f} is a single ratio; in truth it is {slower:.2f}. A neighbour arrived half-way, and a summary "
            "of all runs does not know which two were made one after the other",
            "one ratio per pair: what slows both of its runs cancels",
        )
    if verdict not in VERDICTS:
        raise Mistake(f"there is no verdict {verdict!r:.60}", f"say one of {words}")
    return [number(r, "1.02") for r in ratios], verdict


def _check_ratios(ratios: list[float], machine: DriftingMachine) -> None:
    a, b = ([r.seconds for r in machine.runs if r.name == name] for name in "ab")
    if _same(ratios, [y / x for x, y in zip(a, b, strict=True)]):
        return
    if len(ratios) != len(a):
        lost = len(a) - len(ratios)
        raise Mistake(
            f"{len(a)} pairs were run, but there are {len(ratios)} ratios"
            + (f": {lost} are missing" if lost > 0 else ""),
            "keep every pair: slow ones are part of the truth, and they do not trouble a median",
        )
    for wrong, what, hint in RATIO_SLIPS:
        if _same(ratios, wrong(a, b, machine)):
            raise Mistake(what, hint)
    raise Mistake(
        f"the first pair took {a[0]:.4f} s (a) and {b[0]:.4f} s (b): its ratio is {b[0] / a[0]:.4f}, your "
        f"first one is {ratios[0]:.4f}",
        "seconds of b / seconds of a, both of the same pair",
    )


def _same(x: Sequence[float], y: Sequence[float]) -> bool:
    """Whether both hold the same numbers, in any order."""
    return len(x) == len(y) and all(math.isclose(p, q, rel_tol=1e-6) for p, q in zip(sorted(x), sorted(y), strict=True))


Seconds = list[float]
RATIO_SLIPS: list[tuple[Callable[[Seconds, Seconds, DriftingMachine], Seconds], str, str]] = [
    (
        lambda a, b, m: [x / y for x, y in zip(a, b, strict=True)],
        "your ratios are upside down: a over b",
        "seconds of b / seconds of a, so that more than 1 means: b is slower",
    ),
    (
        lambda a, b, m: [y - x for x, y in zip(a, b, strict=True)],
        "these are differences, in seconds: they grow by half when the neighbour comes, a ratio does not",
        "divide b's seconds by a's",
    ),
    (
        lambda a, b, m: [100 * (y / x - 1) for x, y in zip(a, b, strict=True)],
        "these are changes in percent",
        "return the ratios themselves, such as 1.02",
    ),
    (
        lambda a, b, m: [100 * y / x for x, y in zip(a, b, strict=True)],
        "these are ratios in percent",
        "return the ratios themselves, such as 1.02",
    ),
    (
        lambda a, b, m: [math.log(y / x) for x, y in zip(a, b, strict=True)],
        "these are logarithms of ratios",
        "return the ratios themselves, such as 1.02",
    ),
    (
        lambda a, b, m: [y / x - 1 for x, y in zip(a, b, strict=True)],
        "these are relative changes, 0 if nothing differs",
        "return the ratios themselves, such as 1.02",
    ),
    (
        lambda a, b, m: [second.seconds / first.seconds for first, second in _couples(m)],
        "you divide the second run by the first: where b went first, the ratio is upside down",
        "b over a, whoever of them went first",
    ),
    (
        lambda a, b, m: [y / x for x, y in zip(sorted(a), sorted(b), strict=True)],
        "you sorted the runs before you paired them: a quick run now meets a quick one, not its neighbour in time",
        "pair first; there is nothing to sort",
    ),
    (
        lambda a, b, m: [y / statistics.median(a) for y in b],
        "every run of b is divided by the median of all runs of a, from before and after the neighbour came",
        "divide by the run of a in the same pair",
    ),
    (
        lambda a, b, m: [y / statistics.fmean(a) for y in b],
        "every run of b is divided by the mean of all runs of a, from before and after the neighbour came",
        "divide by the run of a in the same pair",
    ),
    (
        lambda a, b, m: [y / a[0] for y in b],
        "every run of b is divided by the first run of a",
        "divide by the run of a in the same pair: the machine does not stay as it was",
    ),
]


def _couples(machine: DriftingMachine) -> Iterator[tuple[Run, Run]]:
    return zip(machine.runs[::2], machine.runs[1::2], strict=True)


def _check_verdict(verdict: str, interval: Estimate, slower: float) -> None:
    said = f"the interval of the median ratio is [{interval.low:.3f}, {interval.high:.3f}]"
    if not differs(interval):
        if verdict != "no difference" and slower == 1:
            raise Mistake(
                f'{said}: it holds 1, yet you say "{verdict}", and in truth both versions are the same',
                "a median is never exactly 1; only an interval without 1 is a difference",
            )
        return
    right = VERDICTS[interval.low > 1]
    if verdict == "no difference":
        raise Mistake(
            f'{said}: it leaves out 1, yet you say "no difference"',
            "the interval decides, not how large the difference is",
        )
    if verdict != right:
        raise Mistake(f'{said}, yet you say "{verdict}"', "more than 1 means that b takes longer than a")


EXERCISES = {
    "01.1": Exercise("repair a benchmark", check_benchmark, solution.benchmark),
    "01.2": Exercise("compare two versions fairly", check_compare, solution.compare),
    "01.3": Exercise("train an epoch without waiting", check_epoch, solution.train_epoch),
}
