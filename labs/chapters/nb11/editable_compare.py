"""The editable round of notebook 11: a comparison of two programs that may be one and the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from labs.common.timing import probing
from labs.fooled.neighbour import neighbour_on
from labs.kit import measure
from labs.kit.launch import run_on_ranks

Compare = Callable[..., float]
"""compare(a, b, seconds_of) returns the seconds of b over those of a."""
REPEATS = 6
"""Comparisons of each pair of programs."""
MOST_TIMINGS = 1000
"""Of one comparison: more are an endless loop."""
PLANTED = 0.2
FAR = 0.1
"""A ratio that is further from the truth than this is called wrong."""


def try_out(compare: Compare) -> None:
    """Print what `compare` says of the same code twice, and of code with 20 % more work; each 6 times, in turn.

    All of it on one CPU core. Just before half of the timings of a comparison are done, another process moves in on
    that core.
    """
    for truth, ratios, wrong in judged(said_by(compare)):
        what = "the same code " if truth == 1 else f"{100 * PLANTED:.0f} % more work"
        told = "  ".join(f"{r:.2f}" for r in ratios)
        print(f"{what}  truth {truth:.2f}  your answers {told}  wrong by over {FAR:.0%}: {wrong} of {len(ratios)}")


def said_by(compare: Compare) -> dict[float, list[float]]:
    """{true ratio: what the comparison said of it}, from a rank of its own."""
    [said] = run_on_ranks(_said, 1, compare)
    return said


def judged(said: dict[float, list[float]]) -> list[tuple[float, list[float], int]]:
    """(true ratio, answers, how many of them are wrong) of each pair of programs."""
    return [(truth, ratios, sum(abs(r / truth - 1) > FAR for r in ratios)) for truth, ratios in said.items()]


def _said(compare: Compare) -> dict[float, list[float]]:
    step = probing.matmul_step("fp32", 256, torch.device("cpu"))
    products = 5 * max(1, probing.inner_calls(step, torch.device("cpu")) // 5)  # 20 % more is a whole number, too
    programs = {1.0: products, 1.0 + PLANTED: products + products // 5}
    said: dict[float, list[float]] = {truth: [] for truth in programs}
    alone = moving_in(compare)
    for _, (truth, more) in itertools.product(range(REPEATS), programs.items()):
        a, b = (functools.partial(_repeat, step, n) for n in (products, more))
        with clock_beside_a_neighbour(alone) as seconds_of:
            said[truth].append(float(compare(a, b, seconds_of)))
    return said


def _repeat(step: Callable[[], object], n: int) -> None:
    for _ in range(n):
        step()


def moving_in(compare: Compare) -> int:
    """After how many timings the neighbour comes: half of them, or one less, for it is an odd number.

    So it comes within a pair wherever pairs are timed side by side, and most timings of either program are beside it.
    How many timings a comparison takes is found by one with a clock that always says 1 s. RuntimeError if it takes
    more than MOST_TIMINGS.
    """
    timings = itertools.count()

    def one_second(program: Callable[[], None]) -> float:
        if next(timings) >= MOST_TIMINGS:
            raise RuntimeError(f"compare takes more than {MOST_TIMINGS} timings: does its loop end?")
        return 1.0

    compare(lambda: None, lambda: None, one_second)
    half = next(timings) // 2
    return half if half % 2 else half - 1


@contextlib.contextmanager
def clock_beside_a_neighbour(alone: int) -> Iterator[Callable[[Callable[[], None]], float]]:
    """Yields `seconds_of(program)`. A neighbour moves in after `alone` calls of it, and leaves with the block."""
    cpu, calls = torch.device("cpu"), itertools.count(1)
    with contextlib.ExitStack() as stack:

        def seconds_of(program: Callable[[], None]) -> float:
            if next(calls) == alone + 1:
                stack.enter_context(neighbour_on(cpu))
            return measure.time_steps(program, 1, cpu)[0]

        yield seconds_of
