"""Exercises of notebook 01: a comparison, throughput over ranks, cost to a target; 01.1 has a file of its own."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from typing import Any

import numpy as np

from labs.chapters.nb01 import solutions as solution
from labs.chapters.nb01.exercise_benchmark import DriftingMachine, Run, Version, check_benchmark
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
            "each version runs once per pair and no more: who picks among runs picks the result" if more else
            "each version runs once per pair, in all pairs that were asked for",
        )  # fmt: skip


def _check_order(names: list[str], machine: DriftingMachine, slower: float) -> None:
    if names == sorted(names) or names == sorted(names, reverse=True):
        a, b = (statistics.median(r.seconds for r in machine.runs if r.name == name) for name in "ab")
        raise Mistake(
            f"all runs of {names[0]} came before all of {names[-1]}, and in between a neighbour arrived: the medians' "
            f"ratio is {b / a:.2f}, in truth it is {slower:.2f}", "run a and b in turn: both see the same machine",
        )  # fmt: skip
    firsts, pairs = names[::2], len(names) // 2
    if any(x == y for x, y in zip(firsts, names[1::2], strict=True)):
        raise Mistake("a pair is not one run of a and one of b, one right after the other",
                      "a b, b a, a b, ...: runs 1 and 2 are a pair, then 3 and 4")  # fmt: skip
    if min(firsts.count("a"), firsts.count("b")) < pairs / 8:
        late = "b" if firsts.count("a") > firsts.count("b") else "a"
        raise Mistake(f"{late} was the second of its pair {max(map(firsts.count, 'ab'))} of {pairs} times, and whoever "
                      f"comes second is slower on this machine", "let them take turns: a b, b a, a b, ...")  # fmt: skip


def _two(answer: Any, slower: float) -> tuple[list[float], str]:
    """(ratios, verdict) of a learner's answer; Mistake if it does not hold both."""
    words = ", ".join(f'"{v}"' for v in VERDICTS)
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
    raise Mistake(f"the first pair took {a[0]:.4f} s (a) and {b[0]:.4f} s (b): its ratio is {b[0] / a[0]:.4f}, your "
                  f"first one is {ratios[0]:.4f}", "seconds of b / seconds of a, both of the same pair")  # fmt: skip


def _same(x: Sequence[float], y: Sequence[float]) -> bool:
    """Whether both hold the same numbers, in any order."""
    return len(x) == len(y) and all(math.isclose(p, q, rel_tol=1e-6) for p, q in zip(sorted(x), sorted(y), strict=True))


Seconds = list[float]
RATIO_SLIPS: list[tuple[Callable[[Seconds, Seconds, DriftingMachine], Seconds], str, str]] = [
    (lambda a, b, m: [x / y for x, y in zip(a, b, strict=True)], "your ratios are upside down: a over b",
     "seconds of b / seconds of a, so that more than 1 means: b is slower"),
    (lambda a, b, m: [y - x for x, y in zip(a, b, strict=True)], "these are differences, in seconds: they grow by half "
     "when the neighbour comes, a ratio does not", "divide b's seconds by a's"),
    (lambda a, b, m: [100 * (y / x - 1) for x, y in zip(a, b, strict=True)], "these are changes in percent",
     "return the ratios themselves, such as 1.02"),
    (lambda a, b, m: [y / x - 1 for x, y in zip(a, b, strict=True)], "these are relative changes, 0 if nothing differs",
     "return the ratios themselves, such as 1.02"),
    (lambda a, b, m: [second.seconds / first.seconds for first, second in _couples(m)],
     "you divide the second run by the first: where b went first, the ratio is upside down",
     "b over a, whoever of them went first"),
    (lambda a, b, m: [y / x for x, y in zip(sorted(a), sorted(b), strict=True)],
     "you sorted the runs before you paired them: a quick run now meets a quick one, not its neighbour in time",
     "pair first; there is nothing to sort"),
    (lambda a, b, m: [y / statistics.median(a) for y in b], "every run of b is divided by the median of all runs of a, "
     "from before and after the neighbour came", "divide by the run of a in the same pair"),
    (lambda a, b, m: [y / statistics.fmean(a) for y in b], "every run of b is divided by the mean of all runs of a, "
     "from before and after the neighbour came", "divide by the run of a in the same pair"),
    (lambda a, b, m: [y / a[0] for y in b], "every run of b is divided by the first run of a",
     "divide by the run of a in the same pair: the machine does not stay as it was"),
]  # fmt: skip


def _couples(machine: DriftingMachine) -> Iterator[tuple[Run, Run]]:
    return zip(machine.runs[::2], machine.runs[1::2], strict=True)


def _check_verdict(verdict: str, interval: Estimate, slower: float) -> None:
    said = f"the interval of the median ratio is [{interval.low:.3f}, {interval.high:.3f}]"
    if not differs(interval):
        if verdict != "no difference" and slower == 1:
            raise Mistake(f'{said}: it holds 1, yet you say "{verdict}", and in truth both versions are the same',
                          'a median is never exactly 1; only an interval without 1 is a difference')  # fmt: skip
        return
    right = VERDICTS[interval.low > 1]
    if verdict == "no difference":
        raise Mistake(f'{said}: it leaves out 1, yet you say "no difference"',
                      "the interval decides, not how large the difference is")  # fmt: skip
    if verdict != right:
        raise Mistake(f'{said}, yet you say "{verdict}"', "more than 1 means that b takes longer than a")


Steps = list[list[float]]
"""Seconds of each step, by rank."""

# -- 01.3: one number per job


def check_job_samples_per_s(f: Function) -> None:
    """A job small enough to do by hand, one rank alone, and long jobs whose slowest rank changes from step to step."""
    jobs = [([[0.1, 0.3, 0.2], [0.2, 0.1, 0.6]], 10), ([[0.05, 0.04, 0.07]], 8)]
    jobs += [(_steps(ranks, seed=batch), batch) for ranks, batch in ((3, 32), (4, 50), (2, 7))]
    got = [number(f([list(s) for s in steps], batch), "1234.5") for steps, batch in jobs]
    want = [solution.job_samples_per_s(*job) for job in jobs]
    for wrong, what, hint in _rate_slips():
        if np.allclose(got, [wrong(*job) for job in jobs], rtol=1e-6):
            example = f"{jobs[0][0]} and {jobs[0][1]} per rank"
            raise Mistake(f"{what}. For {example} you return {got[0]:.4g}, not {want[0]:.4g}", hint)
    for (steps, batch), value, right in zip(jobs, got, want, strict=True):
        if not np.isclose(value, right, rtol=1e-3):
            case = steps if len(steps[0]) < 5 else f"{len(steps)} ranks with {len(steps[0])} steps each"
            raise Mistake(f"for {case} and {batch} per rank you return {value:.5g}, not {right:.5g}",
                          "n * batch_per_rank samples are done when the slowest rank has ended its step")  # fmt: skip


def _by_step(steps: Steps) -> Iterator[tuple[float, ...]]:
    return zip(*steps, strict=True)


def _steps(ranks: int, seed: int) -> Steps:
    """31 steps of 0.1 s or more; each step has another straggler, and now and then all wait for an outlier."""
    draw = random.Random(seed)
    common = [draw.choice((0.1, 0.1, 0.1, 0.8)) * draw.uniform(0.95, 1.05) for _ in range(31)]
    return [[c * (1 + draw.expovariate(4)) for c in common] for _ in range(ranks)]


Time = Callable[[Steps], float]
Samples = Callable[[int, int], float]
TIMES: list[tuple[Time, str, str]] = [
    (lambda s: statistics.median(map(max, _by_step(s))), "", ""),
    (lambda s: statistics.median(s[0]), "you take rank 0's steps only, and it is not always the slowest",
     "in each step take the slowest rank: the others wait for it in all-reduce"),
    (lambda s: statistics.median(map(statistics.fmean, _by_step(s))), "you average over the ranks",
     "a step ends for all when the slowest rank is done: max, not mean"),
    (lambda s: statistics.fmean(map(statistics.median, s)), "you average the ranks' medians",
     "a step ends for all when the slowest rank is done: max over ranks first, then the median over steps"),
    (lambda s: max(map(statistics.median, s)), "you take each rank's median, then the slowest rank: but in every step "
     "another rank is the slowest", "max over the ranks within a step first, then the median over steps"),
    (lambda s: statistics.median(map(min, _by_step(s))), "you take the fastest rank of each step",
     "the fastest rank waits for the slowest: max, not min"),
    (lambda s: statistics.median(map(sum, _by_step(s))), "you add the ranks' seconds up, as if they took turns",
     "they work at the same time: the slowest rank counts"),
    (lambda s: statistics.median(chain(*s)), "you throw the steps of all ranks together and take the median",
     "the ranks of one step belong together: their slowest is the step"),
    (lambda s: statistics.fmean(map(max, _by_step(s))), "you take the mean over steps (or all samples over "
     "all seconds): the outliers are in it", "a typical step is the median over steps"),
    (lambda s: min(map(max, _by_step(s))), "you take the best step of all", "the median over steps"),
    (lambda s: max(map(max, _by_step(s))), "you take the worst step of all", "the median over steps"),
    (lambda s: statistics.fmean(map(statistics.fmean, s)), "you average over ranks and steps",
     "max over the ranks of a step, then the median over steps"),
    (lambda s: sum(map(max, _by_step(s))), "you divide by the seconds of all steps together",
     "batches and seconds must be those of one step"),
]  # fmt: skip
SAMPLES: list[tuple[Samples, str, str]] = [
    (lambda n, b: n * b, "", ""),
    (lambda n, b: b, "these are the samples of one rank", "all ranks' samples count: times the number of ranks"),
    (lambda n, b: n * n * b, "the number of ranks is in it twice", "n ranks do n * batch_per_rank samples per step"),
    (lambda n, b: n * b * b, "batch_per_rank is in it twice", "n ranks do n * batch_per_rank samples per step"),
    (lambda n, b: 1, "these are steps per second", "times n * batch_per_rank samples per step"),
    (lambda n, b: n, "the batch is missing", "times batch_per_rank"),
    (lambda n, b: n * b / 1e3, "these are samples per millisecond", "the seconds are seconds already"),
]  # fmt: skip


def _rate_slips() -> Iterator[tuple[Callable[[Steps, int], float], str, str]]:
    """What each slip would return: those with one fault before those with two."""
    reference = solution.job_samples_per_s
    yield (lambda s, b: 1 / reference(s, b), "these are seconds per sample", "samples over seconds")
    yield (lambda s, b: sum(b / statistics.median(r) for r in s), "you add up what each rank would do on its own",
           "the ranks are coupled: they all do the slowest one's step")  # fmt: skip
    for faults in (1, 2):
        for (time, *slow), (samples, *few) in product(TIMES, SAMPLES):
            if bool(slow[0]) + bool(few[0]) == faults:
                what, hint = ("; also, ".join(filter(None, texts)) for texts in zip(slow, few, strict=True))
                yield (lambda s, b, t=time, n=samples: n(len(s), b) / t(s)), what, hint


# -- 01.4: the learning rate follows the batch

BIG, HALF_AS_MUCH, SMALL = (0.1, 1024, 256, 20), (0.04, 384, 256, 8), (0.2, 64, 256, 16)
"""Arguments after `step`: the batch times 4, times 1.5, and a quarter of it."""


def check_learning_rate(f: Function) -> None:
    """The rate after the warm-up, then the way there; then a smaller batch, no warm-up, and other numbers."""
    _check_plateau(f)
    _check_warm_up(f)
    _check_smaller_batch(f)
    _check_no_warm_up(f)
    for case in (BIG, HALF_AS_MUCH, SMALL, (0.3, 256, 256, 5), (0.01, 900, 100, 33)):
        for step in (0, 1, case[3] // 2, case[3] - 1, case[3], case[3] + 1, 1000):
            if not np.isclose(got := _rate(f, step, case), want := solution.learning_rate(step, *case), rtol=1e-6):
                raise Mistake(f"for {_call(step, case)} you return {got:.6g}, not {want:.6g}")


def _rate(f: Function, step: int, case: Sequence[float]) -> float:
    return number(f(step, *case), "0.1")


def _call(step: int, case: Sequence[float]) -> str:
    names = ("base_lr", "batch", "base_batch", "warm_up_steps")
    return f"step={step}, " + ", ".join(f"{n}={v:g}" for n, v in zip(names, case, strict=True))


PLATEAUS: list[tuple[Callable[..., float], str, str]] = [
    (lambda lr, b, base, w: lr, "after the warm-up the rate is base_lr: the batch plays no part",
     "the target is base_lr * batch / base_batch"),
    (lambda lr, b, base, w: lr * (b / base) ** 0.5, "you scale with the square root of the batch",
     "that is the usual rule for Adam; here, as for SGD, the rate grows like the batch"),
    (lambda lr, b, base, w: lr * b, "you multiply by the batch itself", "what counts is batch / base_batch"),
    (lambda lr, b, base, w: b / base, "you return the factor, not the rate", "multiply it by base_lr"),
    (lambda lr, b, base, w: lr * base / b, "the ratio is upside down: a larger batch gets a smaller rate",
     "batch / base_batch"),
    (lambda lr, b, base, w: lr * (b // base), "1.5 times the batch gets 1 times the rate: // cuts the fraction off",
     "divide with /"),
    (lambda lr, b, base, w: lr * (1 + b / base), "base_lr is in it twice: the rate ends at base_lr + the target",
     "add the difference between target and base_lr, not the target"),
    (lambda lr, b, base, w: lr + (lr * b / base - lr) * (w - 1) / w, "the rate stops one step short of its target",
     "in step warm_up_steps and after it the rate is the target"),
    (lambda lr, b, base, w: lr * (b / base) ** 2, "the ratio is in it twice", "the target is base_lr * ratio"),
]  # fmt: skip


def _check_plateau(f: Function) -> None:
    late = {case: (_rate(f, 10 * case[3], case), _rate(f, 50 * case[3], case)) for case in (BIG, HALF_AS_MUCH)}
    first, later = late[BIG]
    if not np.isclose(first, later):
        raise Mistake(
            f"the rate never settles: with {_call(10 * BIG[3], BIG)} it is {first:.4g}, 40 warm-ups later {later:.4g}",
            "from step warm_up_steps on it stays at the target",
        )
    got = [first for first, _ in late.values()]
    if np.allclose(got, [solution.learning_rate(1000, *case) for case in late]):
        return
    for wrong, what, hint in PLATEAUS:
        if np.allclose(got, [wrong(*case) for case in late], rtol=1e-6):
            raise Mistake(what, hint)
    raise Mistake(f"with {_call(10 * BIG[3], BIG)} you return {first:.6g}, not 0.4", "base_lr * batch / base_batch")


WARM_UPS: list[tuple[Callable[[float, float, int, int], float], str, str]] = [
    (lambda lr, to, s, w: to, "there is no warm-up: step 0 has the target rate already",
     "begin at base_lr, at which the parameters are known to survive"),
    (lambda lr, to, s, w: lr if s < w else to, "the rate waits at base_lr, then jumps",
     "go up a little in each step: base_lr + (target - base_lr) * step / warm_up_steps"),
    (lambda lr, to, s, w: to * min(1, s / w), "the warm-up begins at 0: the first step learns nothing",
     "begin at base_lr: add the difference to the target bit by bit"),
    (lambda lr, to, s, w: to * min(1, (s + 1) / w), "the warm-up begins near 0, at target / warm_up_steps",
     "begin at base_lr: add the difference to the target bit by bit"),
    (lambda lr, to, s, w: lr + (to - lr) * min(1, (s + 1) / w), "the rate is one step ahead: step 0 is no longer "
     "base_lr", "steps count from 0: step / warm_up_steps"),
    (lambda lr, to, s, w: lr + (to - lr) * min(1, s / (w + 1)), "the target comes one step late",
     "in step warm_up_steps it must be there: step / warm_up_steps"),
    (lambda lr, to, s, w: lr + (to - lr) * min(1, s / (w - 1)), "the target comes one step early",
     "in step warm_up_steps, not before: step / warm_up_steps"),
    (lambda lr, to, s, w: lr + (to - lr) * min(1, max(0, s - 1) / w), "the rate lags by one step",
     "steps count from 0: step / warm_up_steps"),
    (lambda lr, to, s, w: lr * (to / lr) ** min(1, s / w), "the rate grows by a factor per step",
     "on a straight line: the same amount is added in each step"),
    (lambda lr, to, s, w: lr + to * s / w if s < w else to, "the rate rises above its target and falls back to it",
     "add up to target - base_lr, not the whole target"),
    (lambda lr, to, s, w: to + (lr - to) * min(1, s / w) if s < w else to, "the warm-up runs backwards, from the "
     "target down to base_lr", "swap the two ends"),
]  # fmt: skip


def _check_warm_up(f: Function) -> None:
    cases = [(s, case) for case in (BIG, HALF_AS_MUCH) for s in range(case[3] + 3)]
    got = [_rate(f, s, case) for s, case in cases]
    for wrong, what, hint in WARM_UPS:
        if np.allclose(got, [wrong(c[0], c[0] * c[1] / c[2], s, c[3]) for s, c in cases], rtol=1e-6):
            raise Mistake(what, hint)
    for (step, case), value in zip(cases, got, strict=True):
        if not np.isclose(value, want := solution.learning_rate(step, *case), rtol=1e-6):
            raise Mistake(f"for {_call(step, case)} you return {value:.6g}, not {want:.6g}",
                          "base_lr + (target - base_lr) * step / warm_up_steps")  # fmt: skip


def _check_smaller_batch(f: Function) -> None:
    middle, end = _rate(f, SMALL[3] // 2, SMALL), _rate(f, 10 * SMALL[3], SMALL)
    target, what = SMALL[0] / 4, f"for a quarter of the batch, base_lr={SMALL[0]},"
    if np.isclose(end, SMALL[0]):
        raise Mistake(f"{what} the rate stays {end:.4g}", "the rule holds downwards too: a quarter of the rate")
    if not np.isclose(end, target):
        raise Mistake(f"{what} the rate ends at {end:.4g}, not {target:.4g}",
                      "min(target, ...), if you use it, stops a rate that grows, not one that falls")  # fmt: skip
    if np.isclose(middle, end):
        raise Mistake(f"{what} the rate is {target:.4g} from the start: there is no way down",
                      "the same straight line, whether it leads up or down")  # fmt: skip


def _check_no_warm_up(f: Function) -> None:
    case = (0.1, 512, 256, 0)
    try:
        got = [_rate(f, step, case) for step in (0, 1)]
    except ZeroDivisionError:
        raise Mistake(
            "warm_up_steps=0 ends in a division by zero", "without warm-up return the target at once"
        ) from None
    if not np.allclose(got, 0.2):
        raise Mistake(f"with warm_up_steps=0 the steps 0 and 1 have the rates {got[0]:.4g} and {got[1]:.4g}, not 0.2",
                      "without warm-up the target holds from step 0 on")  # fmt: skip


EXERCISES = {
    "01.1": Exercise("repair a benchmark", check_benchmark, solution.benchmark),
    "01.2": Exercise("compare two versions fairly", check_compare, solution.compare),
    "01.3": Exercise("one number for a job of many ranks", check_job_samples_per_s, solution.job_samples_per_s),
    "01.4": Exercise("a learning rate that follows the batch", check_learning_rate, solution.learning_rate),
}
