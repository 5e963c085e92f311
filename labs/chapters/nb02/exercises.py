"""Exercises of notebook 02: a loader for every rank, what limits, the cheapest setting, shards for every process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labs.chapters.nb02 import solutions as solution
from labs.chapters.nb02.exercise_loader import check_my_shards
from labs.chapters.nb02.exercise_rank_loader import check_rank_loader
from labs.kit.check import Exercise, Mistake
from labs.kit.measure import paired_ratio

Function = Callable[..., Any]
median, mean = statistics.median, statistics.fmean
ROUNDS = 12


def samples(median: float, noise: float, seed: int = 0) -> list[float]:
    """One sample per round: exact quantiles of a log-normal spread `noise` around `median`, in a shuffled order."""
    normal = statistics.NormalDist()
    spread = [normal.inv_cdf((i + 0.5) / ROUNDS) for i in np.random.default_rng(seed).permutation(ROUNDS)]
    return [median * math.exp(noise * z) for z in spread]


def slowing(values: list[float], factor: float) -> list[float]:
    """`values`, times `factor` in the second half of the rounds."""
    return [v * (factor if i >= ROUNDS // 2 else 1) for i, v in enumerate(values)]


# {case: (seconds per step of the model, of the loader)}
PAIRS = {
    "slow loader": (samples(0.080, 0.03, 1), samples(0.120, 0.03, 2)),
    "slow model": (samples(0.150, 0.03, 3), samples(0.060, 0.03, 4)),
    "one outlier": (samples(0.100, 0.02, 5), [*samples(0.080, 0.02, 6)[:-1], 1.5]),
    "alike": (samples(0.100, 0.08, 7), samples(0.101, 0.08, 8)),
    "small and sure": (samples(0.100, 0.003, 9), samples(0.104, 0.003, 10)),
    "slowing machine": (slowing(samples(0.100, 0.01, 11), 2), slowing(samples(0.115, 0.01, 12), 2)),
    "far and unsure": (samples(0.100, 0.25, 13), samples(0.106, 0.25, 14)),
}


def check_limit(f: Function) -> None:
    """The slower one by name where the samples show it, and its median as the step to expect."""
    answers = {case: _pair(f(list(model_s), list(loader_s))) for case, (model_s, loader_s) in PAIRS.items()}
    named = {case: name for case, (name, _) in answers.items()}
    if named["slow loader"] == "model" and named["slow model"] == "loader":
        raise Mistake("you name the faster of the two", "the slower one limits: the other waits for it")
    by_size = {
        case: solution.limit(sorted(model_s), sorted(loader_s))[0] for case, (model_s, loader_s) in PAIRS.items()
    }
    wider = (samples(0.100, 0.01, 15), samples(0.101, 0.2, 16))  # only who ignores the noise has a slower one here
    if named == by_size and _pair(f(*map(list, wider)))[0] == solution.limit(*map(sorted, wider))[0] == "neither":
        raise Mistake(
            "you sort the samples before you pair them: what the machine did in a round no longer cancels",
            "paired_ratio(loader_s, model_s), as they came",
        )
    for case in PAIRS:
        _check_name(case, named[case])
    _check_expected({case: expected_s for case, (_, expected_s) in answers.items()})


def _pair(answer: Any) -> tuple[str, float]:
    try:
        name, expected_s = answer
        if isinstance(expected_s, str):
            raise Mistake(f"you return {answer!r:.60}", "the name comes first, then the seconds")
        if name not in ("model", "loader", "neither"):
            raise Mistake(f'{name!r:.40} is none of "model", "loader" and "neither"', "return (name, expected_s)")
        return name, float(expected_s)
    except (TypeError, ValueError):
        raise Mistake(f"{answer!r:.60} is not a name and a number", 'such as ("loader", 0.125)') from None


def _check_name(case: str, got: str) -> None:
    model_s, loader_s = PAIRS[case]
    want = solution.limit(model_s, loader_s)[0]
    if got == want:
        return
    slower = sum(b > a for a, b in zip(model_s, loader_s, strict=True))
    answer = f'and you answer "{got}"'
    what, hint = {
        "one outlier": (
            f"in {ROUNDS - slower} of {ROUNDS} rounds the model was slower, {answer}: one step in which "
            "the loader took 1.5 s turns it round",
            "medians, and ratios by round, survive an outlier",
        ),
        "alike": (
            f"the loader was slower in {slower} of {ROUNDS} rounds, the model in {ROUNDS - slower}, {answer}: "
            "these samples cannot show that",
            "name one only if differs(paired_ratio(loader_s, model_s))",
        ),
        "small and sure": (
            f"the loader was slower in every round, by 4 % with 0.3 % of noise, {answer}",
            "no fixed margin: let the samples' own interval decide what can be told apart",
        ),
        "slowing machine": (
            f"the loader was slower in every round, by 15 %, {answer}: after half of the rounds the "
            "machine took twice as long for both",
            "compare round by round: paired_ratio(loader_s, "
            "model_s); two separate intervals hold the machine's moods as well",
        ),
        "far and unsure": (
            f"the medians are 6 % apart, {answer}: the loader was slower in {slower} of {ROUNDS} "
            "rounds, the model in the others",
            "no fixed margin: let the samples' own interval decide",
        ),
    }.get(
        case,
        (
            f'model {_ms(model_s)}, loader {_ms(loader_s)} per step, with 3 % of noise, {answer}, not "{want}"',
            "the slower one limits, if the interval of their ratio leaves out 1",
        ),
    )
    raise Mistake(what, hint)


def _ms(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.0f} ms"


def _check_expected(expected_s: dict[str, float]) -> None:
    unsure = ("alike", "far and unsure")
    sure = [case for case in PAIRS if case not in unsure]
    for wrong, what, hint in SLIPS:
        if np.allclose([expected_s[c] for c in sure], [wrong(*PAIRS[c]) for c in sure], rtol=1e-6):
            raise Mistake(what, hint)
    for case, (model_s, loader_s) in PAIRS.items():
        want = solution.limit(model_s, loader_s)[1]
        if not math.isclose(expected_s[case], want, rel_tol=0.1 if case in unsure else 0.02):
            raise Mistake(
                f"for a model that takes {_ms(model_s)} and a loader that takes {_ms(loader_s)} per step ({case}) you "
                f"expect {expected_s[case] * 1e3:.4g} ms, not {want * 1e3:.4g} ms",
                "both work at the same time, so a step takes as long as the slower one: the larger of the two medians",
            )


SLIPS: list[tuple[Function, str, str]] = [
    (
        lambda m, b: median(m) + median(b),
        "you add the two times, as if the model waited while workers decode",
        "workers prepare the next batches during the step: the slower one alone sets the pace",
    ),
    (
        lambda m, b: min(median(m), median(b)),
        "you expect the time of the faster one, but it has to wait for the other",
        "the larger of the two medians",
    ),
    (
        lambda m, b: max(mean(m), mean(b)),
        "you expect a mean, and a single step of 1.5 s moves it",
        "the larger of the two medians",
    ),
    (
        lambda m, b: (median(m) + median(b)) / 2,
        "you expect the average of the two; the slower one sets the pace",
        "the larger of the two medians",
    ),
    (lambda m, b: max(*m, *b), "you expect the slowest step of all, not a typical one", "medians before the maximum"),
    (lambda m, b: max(median(m), median(b)) * 1e3, "you return milliseconds", "expected_s is in seconds"),
    (lambda m, b: 1 / max(median(m), median(b)), "you return steps per second", "expected_s is in seconds per step"),
]


Setting = tuple[int, int | None]
Rates = dict[Setting, list[float]]


@dataclass(frozen=True)
class Sweep:
    """Images/s of each (num_workers, prefetch_factor), cheapest first; the right choice follows from the reference."""

    rates: Rates
    hint: str
    tolerance: float = 0.03
    known: dict[Setting, str] = field(default_factory=dict)
    """What a wrong choice was, in words."""


def rates(noise: float, medians: dict[Setting, float]) -> Rates:
    """One sample per round of each setting."""
    return {setting: samples(m, noise, seed) for seed, (setting, m) in enumerate(medians.items())}


FIRST = "go from the cheapest on, and take the first that is good enough"
OFF, ONE, TWO, FOUR, EIGHT = (0, None), (1, 2), (2, 2), (4, 2), (8, 2)
PLATEAU = rates(0.02, {OFF: 48, ONE: 93, TWO: 188, FOUR: 192, EIGHT: 190})
PRECISE = rates(0.001, {OFF: 100, ONE: 190, TWO: 198, FOUR: 200})
OUTLIER = rates(0.02, {OFF: 50, ONE: 155, TWO: 180, FOUR: 182, EIGHT: 150})
SLOWING = rates(0.01, {OFF: 50, ONE: 88, TWO: 100, FOUR: 100.5})
SWEEPS = [
    Sweep(PLATEAU, FIRST, known={OFF: "the cheapest, fast or not", FOUR: "the fastest", EIGHT: "the most expensive"}),
    Sweep(rates(0.02, {OFF: 40, ONE: 78, TWO: 150, FOUR: 170, EIGHT: 200}), "compare with the best, setting by setting",
          known={TWO: "the first that is better than the average"}),
    Sweep(PRECISE, "certain can still be too small to pay for: ask whether it reaches 1 - tolerance, not 1",
          known={FOUR: "the first that is not shown to be slower at all"}),
    Sweep(PRECISE, "how much may be given away is an argument: use tolerance", tolerance=0.10),
    Sweep(PRECISE, "how much may be given away is an argument: use tolerance", tolerance=0.002),
    Sweep(OUTLIER | {EIGHT: [*OUTLIER[EIGHT][:-1], 900.0]}, "one of the twelve samples of (8, 2) is 900 images/s, the "
          "others are near 150: the best is the one with the largest median"),
    Sweep(rates(0.15, {OFF: 60, ONE: 100, TWO: 190, FOUR: 200}), "a median alone hides how far its samples reach: the "
          "high end of paired_ratio(...) says what they leave possible", tolerance=0.02),
    Sweep(rates(0.01, {OFF: 60, ONE: 52, TWO: 100, FOUR: 101}), "the first worker costs more than it brings, the "
          "second pays: a search must not end where one step is not uphill",
          known={OFF: "where the next setting is no better"}),
    Sweep(rates(0.02, {OFF: 99.5, ONE: 70, TWO: 100, FOUR: 98.5}), "tiny samples need no workers: begin with the "
          "cheapest setting, do not walk down from the best"),
    Sweep({s: slowing(r, 0.5) for s, r in SLOWING.items()}, "after half of the rounds the machine was half as fast: "
          "compare round by round, paired_ratio(rates[setting], rates[best])"),
    Sweep(rates(0.015, {OFF: 40, TWO: 110, FOUR: 200, (2, 16): 199, EIGHT: 201}), "the order of `rates` is that of "
          "cost: here prefetched batches cost more than workers",
          known={(2, 16): "the smallest tuple, or the fewest workers, of those that are good enough"}),
]  # fmt: skip


def check_cheapest(f: Function) -> None:
    """The cheapest setting that is not shown to lose more than the tolerance, in sweeps of all kinds."""
    for case in SWEEPS:
        got = f({setting: list(samples_per_s) for setting, samples_per_s in case.rates.items()}, case.tolerance)
        if not isinstance(got, Hashable) or got not in case.rates:
            raise Mistake(f"{got!r:.60} is none of the settings", "return one of the keys of `rates`")
        want = solution.cheapest(case.rates, case.tolerance)
        if got != want:
            if all(f(c.rates, c.tolerance) == _certainly_good(c) for c in SWEEPS):
                raise Mistake(
                    f"you choose {got}, the first that is shown to be good enough, by the low end of its "
                    f"interval. {want} is cheaper, and nothing shows that it loses more than the tolerance",
                    "a setting is out when even the high end of its interval is too low",
                )
            known = f", {case.known[got]}" if got in case.known else ""
            shown = ", ".join(f"{s}: {median(r):.3g}" for s, r in case.rates.items())
            raise Mistake(
                f"{{{shown}}} images/s (medians), tolerance {100 * case.tolerance:g} %: you choose {got}"
                f"{known}. {_facts(case, got, want)}",
                case.hint,
            )


def _certainly_good(case: Sweep) -> Setting:
    """What `.low` in place of `.high` would choose."""
    best = max(case.rates, key=lambda s: median(case.rates[s]))
    good = (s for s, r in case.rates.items() if paired_ratio(r, case.rates[best]).low >= 1 - case.tolerance)
    return next(good, best)


def _facts(case: Sweep, got: Setting, want: Setting) -> str:
    best = max(case.rates, key=lambda s: median(case.rates[s]))
    order, allowed = list(case.rates), f"{100 * case.tolerance:g} %"
    if order.index(got) > order.index(want):
        share = paired_ratio(case.rates[want], case.rates[best])
        than = "" if want == best else f": it has {share} of {best}'s images/s"
        return f"{want} is cheaper, and its samples do not show that it loses more than {allowed}{than}"
    share = paired_ratio(case.rates[got], case.rates[best])
    return f"It has {share} of {best}'s images/s: its samples show that it loses more than {allowed}"


EXERCISES = {
    "02.1": Exercise("a loader for every rank and epoch", check_rank_loader, solution.rank_loader),
    "02.2": Exercise("what limits the pipeline, and the step to expect", check_limit, solution.limit),
    "02.3": Exercise("the cheapest setting within noise of the best", check_cheapest, solution.cheapest),
    "02.4": Exercise("shards for every worker of every rank", check_my_shards, solution.my_shards),
}
