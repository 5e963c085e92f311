"""Typical mistakes in telling which cures are worth it."""

from __future__ import annotations

from labs.chapters.nb12.exercise_first_cure import AS_IS
from labs.kit.measure import paired_ratio


def way(key="low", enough="low", factor=True, flip=False, reverse=True, keep=False, worth=1.05):
    """The reference with something else in one place."""

    def worth_it(turns, samples):
        found = {}
        for name, seconds in turns.items():
            if name == AS_IS and not keep:
                continue
            a = [t * (samples[name] / samples[AS_IS] if factor else 1) for t in turns[AS_IS]]
            found[name] = paired_ratio(seconds, a) if flip else paired_ratio(a, seconds)
        names = [n for n in found if getattr(found[n], enough) >= worth or (keep and n == AS_IS)]
        return sorted(names, key=lambda n: getattr(found[n], key), reverse=reverse)

    return worth_it


def by_name(turns, samples):
    return ["same batch again", "larger batch", "no exchange"]


def worst_round(turns, samples):
    least = {n: min(samples[n] / 32 * a / b for a, b in zip(turns[AS_IS], turns[n], strict=True)) for n in turns}
    return sorted((n for n in least if least[n] >= 1.05), key=least.get, reverse=True)


MUTANTS = {
    "12.2": {
        "steps, not samples": (way(factor=False), "twice as many samples"),
        "sorted by the median": (way(key="value"), "sort by the median"),
        "an interval that holds 1": (way(key="value", enough="value"), "its interval holds 1"),
        "upside down": (way(reverse=False), "order is upside down"),
        "slower ones": (way(flip=True), "what makes it slower"),
        "any gain at all": (way(worth=1.0), "surely faster at all"),
        "the worst round": (worst_round, "worst rounds"),
        "itself": (way(keep=True), "is no change"),
    },
}
