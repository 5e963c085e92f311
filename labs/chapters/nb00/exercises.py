"""Exercises of notebook 00: what is wrong with a machine, how many cores there are, how fast the link is."""

from __future__ import annotations

from collections.abc import Callable, Sized
from operator import index
from typing import Any

from labs.chapters.nb00 import solutions as solution
from labs.chapters.nb00.exercise_busbw import check_busbw
from labs.chapters.nb00.exercise_reports import check_diagnosis
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake

Function = Callable[..., Any]


def check_usable_cores(f: Function) -> None:
    """Affinity and quota both count; whole threads; never none."""
    free = _outcome(lambda: f({0, 1, 2, 3}, "max 100000"))
    if isinstance(free, Exception):
        raise Mistake(f'"max 100000" ends in {type(free).__name__}', '"max" means that there is no quota')
    if isinstance(free, str):
        raise Mistake(f"you return the text {free!r:.60}", "answer an int")
    if isinstance(free, Sized):
        raise Mistake(f"you return {free!r:.60}, not a number", "affinity is a set of cores: its length counts them")
    no_quota = '"max" means that there is no quota: the affinity alone counts'
    _same(number(free, "4"), 4, 'four cores and "max 100000"', no_quota)
    if (got := f({5}, "max 100000")) == 6:
        raise Mistake(
            "affinity {5}, one core, became 6 cores", "it holds the cores' numbers: count them, len(affinity)"
        )
    _same(got, 1, 'affinity {5} and "max 100000"', no_quota)
    other = _outcome(lambda: f({0, 1, 2, 3}, "max 50000"))
    if isinstance(other, Exception) or other != 4:
        ends = f"ends in {type(other).__name__}" if isinstance(other, Exception) else f"gives {other!r:.60}, not 4"
        raise Mistake(
            f'"max 100000" is read rightly, and "max 50000" {ends}: you compare the whole text',
            'split it: only the quota is "max", and the second number is the period',
        )
    if (got := f({5}, "400000 100000")) == 4:
        raise Mistake("a quota of 4 gave 4 cores to a process that may run on one", "take the smaller of the two")
    _same(got, 1, 'affinity {5} and "400000 100000"')
    if (got := f(set(range(8)), "200000 100000")) == 8:
        raise Mistake("the quota is ignored", "200000 100000 grants 2 CPU seconds per second, whatever the affinity")
    _same(got, 2, 'eight cores and "200000 100000"', "quota / period = 200000 / 100000 cores")
    if (got := f(set(range(8)), "100000 50000")) == 1:
        raise Mistake("the period was taken to be 100000", "the second number is the period: 100000 / 50000 = 2 cores")
    _same(got, 2, 'eight cores and "100000 50000"')
    if (got := f(set(range(8)), "50000 100000")) == 0:
        raise Mistake("half a core became 0 cores", "something can always run: at least 1")
    if got == 8:
        raise Mistake(
            "half a core became 8 cores, as if there were no quota",
            "int(0.5) is 0, and `0 or other` is the other: max(1, ...)",
        )
    if got == 0.5:
        raise Mistake("half a core gives 0.5", "whole threads, at least 1")
    _same(got, 1, 'eight cores and "50000 100000"')
    if f(set(range(8)), "220000 100000") == 3:
        raise Mistake("2.2 cores became 3", "the third thread would run a fifth of the time: round down")
    if (got := f(set(range(8)), "270000 100000")) == 3:
        raise Mistake("2.7 cores became 3", "the third thread would be stopped for part of every period: round down")
    if got == 2.7:
        raise Mistake("2.7 cores stay 2.7", "whole threads: round down")
    _same(got, 2, 'eight cores and "270000 100000"')
    for answer in (free, got):
        try:
            index(answer)
        except TypeError:
            raise Mistake(f"{answer!r} is not a whole number", "a rank takes one core: answer an int") from None


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (KeyError, ValueError, IndexError, TypeError, StopIteration) as e:
        return e


def _same(got: Any, want: Any, case: str, hint: str = "") -> None:
    if got != want:
        raise Mistake(f"for {case} you return {got!r}, not {want!r}", hint)


EXERCISES = {
    "00.1": Exercise("diagnose machines from their reports", check_diagnosis, solution.diagnose),
    "00.2": Exercise("count usable cores from affinity and cpu.max", check_usable_cores, solution.usable_cores),
    "00.3": Exercise("measure the bus bandwidth of an all-reduce", check_busbw, solution.measured_busbw_gb_s),
}
