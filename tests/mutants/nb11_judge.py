"""Typical mistakes in judging a statement by records."""

from __future__ import annotations

import statistics

import numpy as np

from labs.kit.measure import Estimate, paired_ratio


def unpaired(a, b):
    """Interval of the ratio of two medians, each of all rounds."""
    draw = np.random.default_rng(0)
    medians = [np.median(draw.choice(x, (2000, len(x))), axis=1) for x in (a, b)]
    low, high = np.percentile(medians[0] / medians[1], (2.5, 97.5))
    return Estimate(statistics.median(a) / statistics.median(b), low, high, len(a))


def point(a, b):
    middle = paired_ratio(a, b).value
    return Estimate(middle, middle, middle, len(a))


def way(
    gain=paired_ratio,
    kinds=("measured", "recorded"),
    mixed=False,
    least=6,
    convert=True,
    flip=False,
    pick=None,
    missing="not tried yet",
    worth=1.05,
    undecided=True,
    other="depends",
    reason=str,
    cut=False,
    crash=False,
    why=str,
):
    """A judge that is right by default, with as many mistakes as there are arguments."""

    def judge(records):
        gains = {}
        for data in dict.fromkeys(r.case["data"] for r in records.where("load_time")):
            for group in [kinds] if mixed else [(kind,) for kind in kinds]:
                sides = []
                for n in (0, 4):
                    found = [r for r in records.where("load_time", data=data, workers=n) if r.kind in group]
                    if found or (crash and group == ("measured",)):
                        r = found[0]
                        sides.append([s / (1000 if convert and r.unit == "ms" else 1) for s in r.samples])
                if len(sides) == 2 and cut:
                    sides = [side[: min(map(len, sides))] for side in sides]
                if len(sides) == 2 and len(sides[0]) == len(sides[1]) >= least:
                    gains[data] = gain(*sides[:: -1 if flip else 1])
        if not gains:
            return missing, why("nothing to compare")
        decided = list(gains.values())[:pick]
        if not undecided:
            decided = [g for g in decided if g.low >= worth or g.high < worth] or decided
        if all(g.low >= worth for g in decided):
            return "holds", reason(gains)
        if all(g.high < worth for g in decided):
            return "does not hold", reason(gains)
        return other, reason(gains)

    return judge


MUTANTS = {
    "11.1": {
        "medians alone": (way(gain=point), "by a median alone"),
        "unpaired medians": (way(gain=unpaired), "unpaired medians"),
        "a model's number": (way(kinds=("measured", "recorded", "modelled", "published")), "nobody measured"),
        "too few rounds": (way(least=1), "too few rounds"),
        "a number from elsewhere": (
            way(reason=lambda gains: f"{gains}, that is 2.34 times"),
            "2.34, which these records",
        ),
        "one data set for all": (way(pick=1), "data set for all"),
        "milliseconds": (way(convert=False), "milliseconds by seconds"),
        "upside down": (way(flip=True), "upside down"),
    }
}


def each(form):
    """A reason that tells of each data set in this form."""
    return lambda gains: ", ".join(f"{data}: {form(gain)}" for data, gain in gains.items())


RARER = {
    "a guess": (way(missing="holds"), "that is a guess"),
    "a digit that says nothing": (
        way(reason=lambda _: "with 4 workers it is faster"),
        "does not give the ratio of photos",
    ),
    "one digit": (way(reason=each(lambda g: f"{g.value:.0f} times")), "does not give the ratio of photos"),
    "a reason upside down": (way(reason=each(lambda g: f"{1 / g.value:.2f} as long")), "is upside down"),
    "a slightly wrong number": (
        way(reason=each(lambda g: f"{g.value + 0.02:.3f} [{g.low}, {g.high}]")),
        "ratio of photos",
    ),
    "no interval": (way(reason=each(lambda g: f"{g.value:.2f} times")), "end of its interval"),
    "the ratio three times": (
        way(reason=each(lambda g: f"{g.value:.2f}, so {g.value:.2f}, or {g.value:.3f}")),
        "its interval",
    ),
    "no upper end": (way(reason=each(lambda g: f"{g.value:.2f}, at least {g.low:.2f}")), "without the upper end"),
    "one data set's reason": (
        way(reason=lambda gains: str(next(iter(gains.values())))),
        "not give the ratio of photos",
    ),
    "a time": (way(reason=each(lambda g: "it takes 0.0401 s")), "is a time of|nor an end"),
    "a number where nothing counts": (way(why=lambda _: "it would be 3.21 times"), "3.21, which these records"),
    "any gain": (way(worth=1.0), "any gain at all"),
    "two machines": (way(mixed=True), "compare two machines"),
    "not shown is refuted": (way(other="does not hold"), "not shown is not refuted|one data set for all"),
    "an undecided one left out": (way(undecided=False), "leave out the data set that shows nothing"),
    "no reason": (way(reason=lambda _: " "), "has no reason"),
    "a reason without a number": (way(reason=lambda _: "it is faster"), "holds no number"),
    "pairs of what is left": (way(cut=True), "one of them is missing"),
    "a crash": (way(crash=True), "instead of a verdict"),
    "another word": (way(other="maybe"), "'maybe' is no verdict"),
    "recorded left out": (way(kinds=("measured",)), "you leave out what was recorded"),
    "a word alone": (lambda records: way()(records)[0], "return (verdict, reason)"),
}
