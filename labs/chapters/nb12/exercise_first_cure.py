"""Exercise 12.2: which cures are worth it, from steps that were taken in turn; tried on made runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labs.kit import measure
from labs.kit.check import Exercise, Mistake

AS_IS = "as it is"
WORTH = 1.05
Turns = Mapping[str, Sequence[float]]
ROUNDS = 16
SEEDS = range(300, 306)


def worth_it(turns, samples):
    """Names of the changes that surely make a sample at least 1.05 times as fast, the surest first.

    Sure: the 95 % interval of the median gain begins at 1.05 or above; the surer, the higher it begins.
    `turns` holds seconds of a step, by name, one for each round; all steps of a round were taken side by side in time.
    `samples` says, by name, how many samples there are in a step.
    """
    low = {}
    for name in turns.keys() - {AS_IS}:
        factor = samples[name] / samples[AS_IS]
        gain = measure.paired_ratio([factor * t for t in turns[AS_IS]], turns[name])
        low[name] = gain.low  # not the median: a lucky run with a wide interval comes later
    return sorted((name for name in low if low[name] >= WORTH), key=lambda name: -low[name])


def case(seed: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Steps of a machine that is half as fast in the middle of the run, and samples of a step."""
    draw = random.Random(seed)
    base = [0.05 * (2.0 if ROUNDS // 4 <= k < 3 * ROUNDS // 4 else 1.0) * draw.uniform(0.9, 1.1) for k in range(ROUNDS)]
    wide = draw.sample([1.15, 1.2, 1.2, 1.25, 1.25, 1.3, 1.3, 1.35, 2.5, 2.5, 2.6, 2.6, 2.7, 2.7, 2.8, 2.8], ROUNDS)
    lucky = draw.sample([0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1.3, 1.4, 1.4, 1.5, 1.6, 1.6, 1.7, 1.8, 1.9], ROUNDS)
    clear, small = draw.uniform(1.6, 1.7), draw.uniform(1.35, 1.4)
    gains = {
        AS_IS: [1.0] * ROUNDS, "same batch again": [clear] * ROUNDS, "larger batch": [0.5 * small] * ROUNDS,
        "no printing": [1.0] * ROUNDS, "half precision": [0.8] * ROUNDS, "compiled": lucky, "no exchange": wide,
    }  # fmt: skip
    turns = {name: [b / g * draw.uniform(0.985, 1.015) for b, g in zip(base, of, strict=True)]
             for name, of in gains.items()}  # fmt: skip
    names = draw.sample(sorted(turns), len(turns))
    return {name: turns[name] for name in names}, {name: 64 if name == "larger batch" else 32 for name in names}


def shown_case(seed: int = 0) -> None:
    """Show a made run: median step, samples, and how far apart the rounds are."""
    import statistics

    import pandas

    from labs.kit.display import show_table

    turns, samples = case(seed)
    rows = [{"name": name, "samples": samples[name], "median step (ms)": round(1e3 * statistics.median(s)),
             "first four rounds (ms)": ", ".join(f"{1e3 * t:.0f}" for t in s[:4])}
            for name, s in turns.items()]  # fmt: skip
    show_table(pandas.DataFrame(rows).set_index("name"))
    print(f"{ROUNDS} rounds")


def _by(turns: Turns, samples: Mapping[str, int], score: Callable[[list[float], list[float]], tuple[float, float]],
        factor: bool = True) -> list[str]:  # fmt: skip
    """Names whose first score is enough, by the second one."""
    scores = {}
    for name in turns.keys() - {AS_IS}:
        times = samples[name] / samples[AS_IS] if factor else 1.0
        scores[name] = score([times * t for t in turns[AS_IS]], list(turns[name]))
    return sorted((n for n in scores if scores[n][0] >= WORTH), key=lambda n: -scores[n][1])


def _paired(a: list[float], b: list[float]) -> measure.Estimate:
    return measure.paired_ratio(a, b, resamples=999)


SLIPS: tuple[tuple[Callable[[Turns, Mapping[str, int]], list[str]], str, str], ...] = (
    (lambda t, s: _by(t, s, lambda a, b: (_paired(a, b).low,) * 2, factor=False),
     "you compare steps, though a step of the larger batch holds twice as many samples",
     "seconds per sample: a step's seconds by its samples"),
    (lambda t, s: _by(t, s, lambda a, b: (_paired(a, b).low, _paired(a, b).value)),
     "you sort by the median: what has the highest one here has a wide interval, and is not the surest",
     "by the lower end of the interval"),
    (lambda t, s: _by(t, s, lambda a, b: (_paired(a, b).value,) * 2),
     "you take what its median says, though its interval holds 1: this run cannot show that it helps",
     "the lower end of the interval decides"),
    (lambda t, s: _by(t, s, lambda a, b: (_paired(a, b).low,) * 2)[::-1],
     "the order is upside down", "the surest comes first"),
    (lambda t, s: _by(t, s, lambda a, b: (_paired(b, a).low,) * 2),
     "you return what makes it slower: the ratio is upside down", "as it is / changed"),
)  # fmt: skip


def check_worth_it(f: Callable[..., Any]) -> None:
    """The same names in the same order, in every made run."""
    for seed in SEEDS:
        turns, samples = case(seed)
        got, want = f(turns, samples), worth_it(turns, samples)
        if isinstance(got, str) or not hasattr(got, "__iter__"):
            raise Mistake(f"you return {got!r:.60}, not a list of names", f"for example {want}")
        got = list(got)
        if got == want:
            continue
        if AS_IS in got:
            raise Mistake(f"{AS_IS!r} is no change", "leave it out")
        for wrong, what, hint in SLIPS:
            if got == wrong(turns, samples):
                raise Mistake(what, hint)
        raise Mistake(f"in case({seed}) {want} are worth it, in this order, and you return {got}",
                      "lower end of the 95 % interval of the median of ratios within rounds, per sample")  # fmt: skip


EXERCISE = Exercise("which cures are worth it", check_worth_it, worth_it)
