"""Typical mistakes in exercise 09.3: {mistake: (function, words that its feedback must hold)}."""

from __future__ import annotations

ILL = 1.15


def sides(measure):
    """Both sides, each without the other."""
    return {"loader": measure("loader alone"), "training": measure("same batch")}


def right(measure, healthy):
    """The answer, with what a step takes after each cure."""
    now, cures = sides(measure), []
    while now[slower := max(now, key=now.get)] > ILL * healthy[slower]:
        now[slower] = healthy[slower]
        cures.append((slower, max(now.values())))
    return cures


def by_shares(measure, healthy):
    """Looks at the wait for data, as a profile of the step shows it."""
    if measure("step") <= ILL * max(healthy.values()):
        return []
    waits = measure("wait for data") > 1e-3
    return [("loader", healthy["training"])] if waits else [("training", healthy["training"])]


def each_alone(measure, healthy):
    now = sides(measure)
    step, found = max(now.values()), []
    for side in sorted(now, key=now.get, reverse=True):
        if now[side] > ILL * healthy[side] and max((now | {side: healthy[side]}).values()) < step / ILL:
            found.append((side, max((now | {side: healthy[side]}).values())))
    return found


def first_only(measure, healthy):
    return right(measure, healthy)[:1]


def hidden_first(measure, healthy):
    now = sides(measure)
    cures = [cure for cure, _ in right(now_as_measure(dict(now)), healthy)]
    found = []
    for side in reversed(cures):
        now[side] = healthy[side]
        found.append((side, max(now.values())))
    return found


def all_that_is_ill(measure, healthy):
    now, found = sides(measure), []
    for side in sorted(now, key=now.get, reverse=True):
        if now[side] > ILL * healthy[side]:
            now[side] = healthy[side]
            found.append((side, max(now.values())))
    return found


def sums(measure, healthy):
    now = sides(measure)
    step, found = max(now.values()), []
    for side, _ in right(now_as_measure(now), healthy):
        step -= now[side] - healthy[side]
        found.append((side, step))
    return found


def now_as_measure(now):
    return lambda name: now["loader" if name == "loader alone" else "training"]


def own_seconds(measure, healthy):
    return [(side, healthy[side]) for side, _ in right(measure, healthy)]


def added(measure, healthy):
    now, found = sides(measure), []
    for side, _ in right(now_as_measure(dict(now)), healthy):
        now[side] = healthy[side]
        found.append((side, sum(now.values())))
    return found


def buys_all(measure, healthy):
    measure("step"), measure("wait for data")
    return right(measure, healthy)


MUTANTS = {
    "09.3": {
        "each alone": (each_alone, "both called healthy"),
        "first only": (first_only, "stop after the first cure"),
        "hidden first": (hidden_first, "the hidden side first"),
        "all that is ill": (all_that_is_ill, "also where a healthy side is the slower one"),
        "sums": (sums, "do not add up"),
        "own seconds": (own_seconds, "the seconds of the side that was cured"),
        "buys all": (buys_all, "you have 6 s"),
        "by shares": (by_shares, "you look at the wait for data alone"),
    }
}
MORE = {"added": (added, "you add the seconds of the loader and of the training")}
"""Beyond the eight that the tests of all exercises take."""
