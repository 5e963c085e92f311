"""Exercise 09.3: a training with two illnesses that hide each other: what to measure, what to cure, in which order."""

from __future__ import annotations

import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake

PRICES_S = {"step": 1.0, "same batch": 2.0, "loader alone": 2.0, "wait for data": 3.0}
"""What each measurement costs; `measure(name)` returns seconds per step."""
PURSE_S = 6.0
ILL = 1.15  # times what is healthy
NOISE, TOLERANCE = 0.01, 0.06  # relative: of a reading, of an answer
Plan = list[tuple[str, float]]
Measure = Callable[[str], float]

TASK = """
A loader prepares the next batch while the device trains: a step takes as long as the slower of the two. Both may be
ill. Write `treatment(measure, healthy)`: the cures in the order in which you would apply them, each with the seconds
that a step takes after it: `[("training", 0.021), ("loader", 0.006)]`, or `[]` if no cure makes the step shorter.
`measure(name)` returns seconds per step and costs: "step" 1 s, "same batch" 2 s (the training without its loader),
"loader alone" 2 s (batches as fast as they come), "wait for data" 3 s (of each step). You have 6 s. `healthy` holds
what a healthy "loader" and a healthy "training" take; 15 % more is ill. A cure that brings nothing is not applied.
"""
HINTS = (
    "curing one of two illnesses that hide each other gives nothing, or little: measure each side without the other",
    "the slower side decides: cure it if it is ill, and look which side is the slower one then",
)


@dataclass(frozen=True)
class Ward:
    """One patient: seconds per batch of both sides, ill or not, and what they take when they are healthy."""

    loader: float
    training: float
    healthy_loader: float
    healthy_training: float

    @property
    def step(self) -> float:
        """Seconds of a step: the slower side's."""
        return max(self.loader, self.training)

    def reading(self, name: str) -> float:
        """What a measurement finds, without noise."""
        return {
            "step": self.step,
            "same batch": self.training,
            "loader alone": self.loader,
            "wait for data": max(0.0, self.loader - self.training),
        }[name]


CASES = (
    Ward(0.020, 0.0215, 0.004, 0.006),  # the loader is hidden behind the training
    Ward(0.0230, 0.0215, 0.005, 0.007),  # the training behind the loader
    Ward(0.018, 0.008, 0.004, 0.008),  # the loader alone
    Ward(0.003, 0.015, 0.003, 0.006),  # the training alone
    Ward(0.004, 0.006, 0.004, 0.006),  # healthy
    Ward(0.009, 0.012, 0.004, 0.012),  # an ill loader that healthy training hides: no cure shortens the step
    Ward(0.016, 0.012, 0.010, 0.004),  # a healthy loader is the slower one at the end
)


class _Till:
    """Sells measurements of one patient."""

    def __init__(self, ward: Ward, seed: int) -> None:
        self.ward, self.spent, self.bought = ward, 0.0, list[str]()
        self._dice = random.Random(seed)

    def __call__(self, name: str) -> float:
        if name not in PRICES_S:
            raise Mistake(f"you measure {name!r:.40}", f"there are {', '.join(map(repr, PRICES_S))}")
        self.spent += PRICES_S[name]
        self.bought.append(name)
        return self.ward.reading(name) * (1 + self._dice.uniform(-NOISE, NOISE))


def treatment(measure: Measure, healthy: dict[str, float]) -> Plan:
    """Each side is measured without the other; then the slower one is cured, as long as it is ill."""
    now = {"loader": measure("loader alone"), "training": measure("same batch")}
    cures = []
    while True:
        slower = max(now, key=now.__getitem__)  # it decides how long a step takes
        if now[slower] <= ILL * healthy[slower]:
            return cures  # curing the other one would be seen by nobody
        now[slower] = healthy[slower]
        cures.append((slower, max(now.values())))


def right(ward: Ward) -> Plan:
    """What is to be answered."""
    healthy = {"loader": ward.healthy_loader, "training": ward.healthy_training}
    return treatment(lambda name: ward.reading(name), healthy)


Way = Callable[[Ward], Sequence[tuple[str, float]]]


def _ill(w: Ward) -> list[str]:
    sides = (("loader", w.loader, w.healthy_loader), ("training", w.training, w.healthy_training))
    return [name for name, now, well in sorted(sides, key=lambda s: -s[1]) if now > ILL * well]


def _after(w: Ward, cured: Sequence[str]) -> float:
    return max(
        w.healthy_loader if "loader" in cured else w.loader, w.healthy_training if "training" in cured else w.training
    )


def _one_by_one(w: Ward, order: Sequence[str], after: Callable[[Ward, Sequence[str]], float] = _after) -> Plan:
    return [(name, after(w, order[: k + 1])) for k, name in enumerate(order)]


def _sums(w: Ward, cured: Sequence[str]) -> float:
    saved = {"loader": w.loader - w.healthy_loader, "training": w.training - w.healthy_training}
    return w.step - sum(saved[name] for name in cured)


def _alone(w: Ward) -> list[str]:
    """Cures that are seen when each is tried by itself."""
    return [name for name in _ill(w) if _after(w, [name]) < w.step / ILL]


def _waits(w: Ward) -> list[str]:
    """What the wait for data alone tells: the loader if there is any, else the training."""
    if w.step <= ILL * max(w.healthy_loader, w.healthy_training):
        return []
    return ["loader"] if w.loader > w.training else ["training"]


SLIPS: dict[str, tuple[Way, str, str]] = {
    "each alone": (
        lambda w: _one_by_one(w, _alone(w)),
        "you try each cure by itself and drop it if it gives nothing: two illnesses that hide each other are both "
        "called healthy",
        "a cure that gives nothing may have uncovered the other side: keep it, and measure again",
    ),
    "first only": (
        lambda w: _one_by_one(w, [c for c, _ in right(w)][:1]),
        "you stop after the first cure: what it has uncovered is now the slower side, and it is ill, too",
        "after each cure ask again which side is the slower one, until that one is healthy",
    ),
    "hidden first": (
        lambda w: _one_by_one(w, [c for c, _ in right(w)][::-1]),
        "you cure the hidden side first: nobody sees any gain, and the cure is taken back",
        "begin with the slower side: it decides how long a step takes",
    ),
    "all that is ill": (
        lambda w: _one_by_one(w, _ill(w)),
        "you cure all that is ill, also where a healthy side is the slower one: the step stays as long as it was",
        "stop when the slower side is healthy",
    ),
    "sums": (
        lambda w: _one_by_one(w, [c for c, _ in right(w)], _sums),
        "you subtract what each cure saves on its own side: the two sides run at the same time, so their seconds do "
        "not add up",
        "after each cure a step takes as long as the slower side then does",
    ),
    "added sides": (
        lambda w: _one_by_one(
            w,
            [c for c, _ in right(w)],
            lambda w, cured: (
                (w.healthy_loader if "loader" in cured else w.loader)
                + (w.healthy_training if "training" in cured else w.training)
            ),
        ),
        "you add the seconds of the loader and of the training: the loader works ahead while the device trains",
        "a step takes the longer of the two",
    ),
    "waits": (
        lambda w: _one_by_one(w, _waits(w)),
        "you look at the wait for data alone: it is zero behind a slow training, however slow the loader is",
        "measure the loader without the training, and the training without the loader",
    ),
    "own seconds": (
        lambda w: [(c, w.healthy_loader if c == "loader" else w.healthy_training) for c, _ in right(w)],
        "after each cure you promise the seconds of the side that was cured, and the other side is still slower",
        "max(loader, training), with what is cured so far",
    ),
}


def check_treatment(f: Callable[..., Any]) -> None:
    """All patients right within the purse; else the mistake that explains all answers, else the first wrong one."""
    got: list[Plan] = []
    for seed, ward in enumerate(CASES):
        till = _Till(ward, seed)
        answer = f(till, {"loader": ward.healthy_loader, "training": ward.healthy_training})
        got.append(_plan(answer))
        if till.spent > PURSE_S:
            many = ", ".join(till.bought)
            raise Mistake(
                f"you spend {till.spent:g} s on {many}; you have {PURSE_S:g} s",
                "two measurements tell all there is to know here",
            )
    wants = [right(ward) for ward in CASES]
    if all(_alike(g, w) for g, w in zip(got, wants, strict=True)):
        return
    for name, (way, what, hint) in SLIPS.items():
        alike = _same_cures if name == "waits" else _alike  # its seconds can be anything
        if all(alike(g, way(ward)) for g, ward in zip(got, CASES, strict=True)):
            raise Mistake(what, hint)
    k = next(k for k, (g, w) in enumerate(zip(got, wants, strict=True)) if not _alike(g, w))
    raise Mistake(f"{_facts(CASES[k])}: {_attack(CASES[k], got[k], wants[k])}", HINTS[1])


def _plan(answer: Any) -> Plan:
    try:
        rows = [(str(cure), seconds) for cure, seconds in answer]
    except (TypeError, ValueError):
        raise Mistake(f"you return {answer!r:.60}", 'return a list such as [("loader", 0.006)], or []') from None
    found = [(cure, number(seconds, "0.006")) for cure, seconds in rows]
    for cure, _ in found:
        if cure not in ("loader", "training"):
            raise Mistake(f"you cure {cure!r:.40}", 'there are two cures, "loader" and "training"')
    return found


def _same_cures(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> bool:
    return [c for c, _ in a] == [c for c, _ in b]


def _alike(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> bool:
    return _same_cures(a, b) and all(abs(x - y) <= TOLERANCE * abs(y) for (_, x), (_, y) in zip(a, b, strict=True))


def _facts(w: Ward) -> str:
    return (
        f"a loader of {1e3 * w.loader:g} ms (healthy {1e3 * w.healthy_loader:g}) beside a training of "
        f"{1e3 * w.training:g} ms (healthy {1e3 * w.healthy_training:g})"
    )


def _attack(w: Ward, got: Plan, want: Plan) -> str:
    cures = [c for c, _ in got]
    if not want:
        return f"you cure {', '.join(cures)}, and no cure makes the step shorter"
    if not got:
        return f"you cure nothing; {want[0][0]} comes first and makes a step {1e3 * want[0][1]:.3g} ms"
    if cures != [c for c, _ in want]:
        return f"you cure {', '.join(cures)}; right is {', '.join(c for c, _ in want)}"
    k = next(k for k, (g, x) in enumerate(zip(got, want, strict=True)) if not _alike([g], [x]))
    return (
        f"after the cure of the {want[k][0]} you promise {1e3 * got[k][1]:.3g} ms, and a step takes "
        f"{1e3 * want[k][1]:.3g} ms"
    )


EXERCISE = Exercise("two illnesses that hide each other", check_treatment, treatment)


# The same in real time: a thread loads ahead while this one trains


def seconds_per_step(loader_s: float, training_s: float, steps: int) -> float:
    """Of a real pipeline whose two sides sleep: a thread fills a queue of two batches, this one empties it."""
    ready: queue.Queue[int] = queue.Queue(maxsize=2)

    def load() -> None:
        for i in range(steps + 1):
            time.sleep(loader_s)
            ready.put(i)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    ready.get(timeout=60)
    start = time.perf_counter()
    for _ in range(steps):
        time.sleep(training_s)
        ready.get(timeout=60)
    seconds = (time.perf_counter() - start) / steps
    thread.join(timeout=60)
    return seconds


def in_real_time(ward: Ward = CASES[0], steps: int = 12, rounds: int = 5) -> dict[str, float]:
    """Median seconds of a step, measured in turn: as it is, with each cure alone, and with both."""
    ways = {
        "as it is": (ward.loader, ward.training),
        "loader cured": (ward.healthy_loader, ward.training),
        "training cured": (ward.loader, ward.healthy_training),
        "both cured": (ward.healthy_loader, ward.healthy_training),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, sides in ways.items():
            found[name].append(seconds_per_step(*sides, steps))
    return {name: statistics.median(samples) for name, samples in found.items()}
