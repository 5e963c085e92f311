"""Exercise 01.4: logs of step times, each with one fault or none, and what an answer makes of them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

from labs.kit.check import Mistake

STEPS = 60
FAULTS = {
    "steady": "nothing but noise and single outliers",
    "not warm": "the first steps are slower than all later ones",
    "drift": "every step is a little slower than the one before it, to the end",
    "neighbour": "from one step on, all steps are slower by the same factor",
    "straggler": "one rank is slower than the others, in all steps",
    "not synchronised": "most steps take next to nothing, and every few steps one takes the time of all of them",
}
Log = list[list[float]]
"""Seconds of each step, by rank."""


def make_log(fault: str, seed: int) -> Log:
    """60 steps of 2 to 4 ranks. Noise of 2 %, an outlier in every 20 steps; the fault is worth 20 % or more."""
    draw = random.Random(f"{fault} {seed}")
    ranks, base = draw.choice((2, 3, 4)), draw.uniform(0.02, 0.2)
    slow_rank, slower = draw.randrange(ranks), draw.uniform(1.25, 1.7)
    warm, every = draw.randint(3, 8), draw.choice((5, 10))
    jump = draw.choice((*range(15, 25), *range(36, 46)))  # not half-way: the median of a rank would be either time

    at = [draw.randrange(k, k + 20) for k in range(0, STEPS, 20)]
    if seed % 2:  # also where a log is looked at first: its ends
        at[0], at[-1] = 0, STEPS - 1
    outliers = {(draw.randrange(ranks), step) for step in at}

    def factor(rank: int, step: int) -> float:
        if fault == "not warm" and step < warm:
            return 1.6 + draw.uniform(1, 8) / (1 + step)
        if fault == "drift":
            return 1 + slower / 2 * step / STEPS
        if (fault == "neighbour" and step >= jump) or (fault == "straggler" and rank == slow_rank):
            return slower
        if fault == "not synchronised":
            return every if step % every == every - 1 else 0.01
        return draw.uniform(1.5, 4) if (rank, step) in outliers else 1.0

    return [[base * factor(rank, step) * draw.gauss(1, 0.02) for step in range(STEPS)] for rank in range(ranks)]


def printout(log: Log) -> str:
    """Medians of ten steps, in ms, by rank."""

    def of(rank: list[float]) -> str:
        return " ".join(f"{1e3 * statistics.median(rank[i : i + 10]):.3g}" for i in range(0, STEPS, 10))

    return "; ".join(f"rank {r}: {of(rank)}" for r, rank in enumerate(log))


def check_diagnose(f: Callable[..., Any]) -> None:
    """Eight logs of each fault, in a mixed order."""
    cases = [(fault, seed) for seed in range(8) for fault in FAULTS]
    random.Random(0).shuffle(cases)
    said = []
    for fault, seed in cases:
        answer = f([list(rank) for rank in make_log(fault, seed)])
        if not isinstance(answer, str) or answer not in FAULTS:
            raise Mistake(f"you return {answer!r:.60}", f"return one of {', '.join(map(repr, FAULTS))}")
        said.append((fault, seed, str(answer)))
    words = {answer for *_, answer in said}
    if len(words) == 1:
        raise Mistake(f"you call all {len(said)} logs {words.pop()!r}", "look at the list that you are given")
    wrong = [(fault, seed, answer) for fault, seed, answer in said if answer != fault]
    if wrong:
        fault, seed, answer = wrong[0]
        same = sum((fault, answer) == (a, b) for a, _, b in wrong)
        log = make_log(fault, seed)
        raise Mistake(
            f"{len(wrong)} of {len(said)} logs are read wrongly; {same} times {fault!r} is called {answer!r}. "
            f"One of them, medians of ten steps in ms: {printout(log)}; its first five steps: "
            f"{' '.join(f'{1e3 * s:.3g}' for s in log[0][:5])}",
            f"{fault!r} means: {FAULTS[fault]}",
        )
