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
CHANGES = ("same batch again", "larger batch", "no exchange", "half precision", "compiled", "no printing")
SEEDS = range(300, 308)


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
    """Steps of a machine that is half as fast in the middle of the run, and samples of a step.

    Which change gives what is drawn anew; `"larger batch"` always has twice the samples. Of two runs in a row, one has
    a change with a median far above 1.05 whose interval begins above 1 and below 1.05: it helps, and not surely enough.
    """
    draw = random.Random(seed)
    base = [0.05 * (2.0 if ROUNDS // 4 <= k < 3 * ROUNDS // 4 else 1.0) * draw.uniform(0.9, 1.1) for k in range(ROUNDS)]
    clear = draw.uniform(1.6, 1.7)
    gains = {
        "clear": [clear] * ROUNDS,
        # the highest median, and not the surest: half of its rounds give little, and three nothing
        "wide": draw.sample([0.97, 0.99, 1.0, 1.3, 1.3, 1.35, 1.35, *[2.5, 2.6, 2.7] * 3], ROUNDS),
        "small": [draw.uniform(1.2, 1.25)] * ROUNDS,
        "lucky": draw.sample([0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 1.3, 1.4, 1.4, 1.5, 1.6, 1.6, 1.7, 1.8, 1.9], ROUNDS),
        "too little": [1.025, 1.2] * 7 + [1.2, 1.2] if seed % 2 else [1.025] * ROUNDS,
        "slower": [0.8] * ROUNDS,
    }  # fmt: skip
    roles = dict(zip(draw.sample(CHANGES, len(CHANGES)), gains, strict=True))
    samples = {name: 64 if name == "larger batch" else 32 for name in (AS_IS, *CHANGES)}
    turns = {AS_IS: base} | {
        name: [samples[name] / 32 * b / g * draw.uniform(0.985, 1.015) for b, g in zip(base, gains[role], strict=True)]
        for name, role in roles.items()
    }
    names = draw.sample(sorted(turns), len(turns))
    return {name: turns[name] for name in names}, {name: samples[name] for name in names}


def shown_case(seed: int = 0) -> None:
    """Show a made run: median step, samples, and how far apart the rounds are."""
    import statistics

    import pandas

    from labs.kit.display import show_table

    turns, samples = case(seed)
    rows = [
        {
            "name": name,
            "samples": samples[name],
            "median step (ms)": round(1e3 * statistics.median(s)),
            "first four rounds (ms)": ", ".join(f"{1e3 * t:.0f}" for t in s[:4]),
        }
        for name, s in turns.items()
    ]
    show_table(pandas.DataFrame(rows).set_index("name"))
    print(f"{ROUNDS} rounds")


def _by(
    turns: Turns,
    samples: Mapping[str, int],
    of: Callable[[measure.Estimate], float],
    *,
    sort: Any = None,
    per_sample: bool = True,
    flip: bool = False,
    worth: float = WORTH,
) -> list[str]:
    """Names whose gain is enough by `of`, in the order of `sort`, by default the same: an answer with a slip."""
    found = {}
    for name in turns.keys() - {AS_IS}:
        times = samples[name] / samples[AS_IS] if per_sample else 1.0
        before = [times * t for t in turns[AS_IS]]
        found[name] = measure.paired_ratio(*((turns[name], before) if flip else (before, turns[name])), resamples=999)
    return sorted((n for n in found if of(found[n]) >= worth), key=lambda n: -(sort or of)(found[n]))


def _low(gain: measure.Estimate) -> float:
    return gain.low


def _value(gain: measure.Estimate) -> float:
    return gain.value


def _median_of_what_helps(gain: measure.Estimate) -> float:
    return gain.value if gain.low > 1 else 0.0


def _least(turns: Turns, samples: Mapping[str, int]) -> list[str]:
    """By the worst round."""
    worst = {}
    for name in turns.keys() - {AS_IS}:
        factor = samples[name] / samples[AS_IS]
        worst[name] = min(factor * a / b for a, b in zip(turns[AS_IS], turns[name], strict=True))
    return sorted((n for n in worst if worst[n] >= WORTH), key=lambda n: -worst[n])


SLIPS: tuple[tuple[Callable[[Turns, Mapping[str, int]], list[str]], str, str], ...] = (
    (
        lambda t, s: _by(t, s, _low, per_sample=False),
        "you compare steps, though a step of the larger batch holds twice as many samples",
        "seconds per sample: a step's seconds by its samples",
    ),
    (
        lambda t, s: _by(t, s, _low, sort=_value),
        "you sort by the median: what has the highest one here has a wide interval, and is not the surest",
        "by the lower end of the interval",
    ),
    (
        lambda t, s: _by(t, s, _value),
        "you take what its median says, though its interval holds 1: this run cannot show that it helps",
        "the lower end of the interval decides",
    ),
    (
        lambda t, s: _by(t, s, _value, sort=_low),
        "you take what its median says, though its interval holds 1: this run cannot show that it helps",
        "the lower end of the interval decides",
    ),
    (lambda t, s: _by(t, s, _low)[::-1], "the order is upside down", "the surest comes first"),
    (
        lambda t, s: _by(t, s, _low, worth=1.0),
        f"you take what is surely faster at all: asked is {WORTH:g} times as fast, surely",
        f"low >= {WORTH:g}",
    ),
    *(
        (
            lambda t, s, sort=sort: _by(t, s, _median_of_what_helps, sort=sort),
            f"an interval that begins above 1 shows that it helps, and not that it is {WORTH:g} times as fast",
            f"low >= {WORTH:g}",
        )
        for sort in (_low, _value)
    ),
    (
        lambda t, s: _by(t, s, _low, flip=True),
        "you return what makes it slower: the ratio is upside down",
        "as it is / changed",
    ),
    (
        lambda t, s: _by(t, s, _low, flip=True, per_sample=False),
        "you return what makes it slower: the ratio is upside down; and a step of the larger batch holds twice as many "
        "samples",
        "as it is / changed, per sample",
    ),
    (
        lambda t, s: _by(t, s, _value, per_sample=False),
        "you take medians of steps, though an interval may hold 1, and a step of the larger batch holds twice as many "
        "samples",
        "the lower end of the interval of seconds per sample decides",
    ),
    (
        _least,
        "you go by the worst rounds: some bad rounds do not spoil the interval of the median",
        "measure.paired_ratio gives that interval",
    ),
)


def check_worth_it(f: Callable[..., Any]) -> None:
    """The same names in the same order, in every made run; a slip is named if it explains all answers."""
    cases = [case(seed) for seed in SEEDS]
    answers = []
    for turns, samples in cases:
        got = f(turns, samples)
        if isinstance(got, str | set | frozenset) or not hasattr(got, "__iter__"):
            raise Mistake(f"you return {got!r:.60}, not a list of names", "for example ['the surest', 'the next']")
        answers.append([name if isinstance(name, str) else repr(name) for name in got])
    wanted = [worth_it(turns, samples) for turns, samples in cases]
    if answers == wanted:
        return
    for wrong, what, hint in SLIPS:
        if answers == [wrong(turns, samples) for turns, samples in cases]:
            raise Mistake(what, hint)
    for got, want, (turns, samples) in zip(answers, wanted, cases, strict=True):
        if got != want:
            _explain(got, want, turns, samples)


def _explain(got: list[Any], want: list[str], turns: Turns, samples: Mapping[str, int]) -> None:
    """Mistake about the first name that is wrong, with its interval; the answer is not given away."""
    if strange := [name for name in got if name not in turns]:
        raise Mistake(f"{strange[0]!r:.60} is none of the names", "the keys of turns, in order")
    if AS_IS in got:
        raise Mistake(f"{AS_IS!r} is no change", "leave it out")
    if len(set(got)) < len(got):
        raise Mistake("a name is there twice", "each change once")

    def gain(name: str) -> measure.Estimate:
        factor = samples[name] / samples[AS_IS]
        return measure.paired_ratio([factor * t for t in turns[AS_IS]], turns[name])

    if extra := [name for name in got if name not in want]:
        raise Mistake(f"{extra[0]!r} is not surely worth it in a made run: {gain(extra[0])} per sample", HINT)
    if missing := [name for name in want if name not in got]:
        raise Mistake(f"{missing[0]!r} is worth it in a made run, and you leave it out: {gain(missing[0])}", HINT)
    raise Mistake("these are the right names, in another order", "by the lower end of the interval, highest first")


HINT = "lower end of the 95 % interval of the median of ratios within rounds, per sample"


EXERCISE = Exercise("which cures are worth it", check_worth_it, worth_it)
