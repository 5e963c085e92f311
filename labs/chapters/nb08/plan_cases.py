"""Trainings to plan in exercise 08.3, made from seeds: offers, a deadline, a budget, and the model's band."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from labs.parts.checkpoints.checkpoint_interval import lost_share, optimum

HOUR_S = 3600.0
CLEAR = 0.03  # by how much limits and rivals are at least apart, relative: no plan hangs on rounding


@dataclass(frozen=True)
class Option:
    """GPUs that can be had, and what the model says of this training on them."""

    name: str
    gpus: int
    price: float
    """Of one GPU for one hour: made up, as all prices here."""
    step_s: float
    """Modelled seconds of an optimizer step: the middle of the band, without start-up, checkpoints and failures."""
    needs_gb: float
    """Memory that training needs on the fullest GPU, in 10^9 bytes."""
    memory_gb: float
    """Memory of one GPU that training can have."""
    startup_h: float
    """Hours from the first paid one to the first step."""
    gpu_mtbf_h: float
    """Mean hours between failures of one GPU."""
    save_s: float
    """Training stops for so long to save a checkpoint."""
    restart_s: float
    """From a failure until training goes on, in s."""


@dataclass(frozen=True)
class Case:
    """A training to plan."""

    options: tuple[Option, ...]
    steps: int
    band: tuple[float, float]
    """A step takes between so many and so many times the modelled seconds."""
    deadline_h: float
    budget: float


@dataclass(frozen=True)
class Way:
    """How a plan is made. As it is by default it is right; each field is a mistake that can be made."""

    band: float | None = None
    """Times the modelled seconds; None: the upper end."""
    startup: bool = True
    failures: bool = True
    of_the_job: bool = True
    """The mean time between failures is divided by the GPUs."""
    all_gpus: bool = True
    """Every GPU is paid."""
    memory: bool = True
    deadline: bool = True
    budget: bool = True
    least: str = "money"
    """What is made small: money, hours, or money per hour."""


CARDS = (("A", 1.0, 40, 1.0), ("B", 1.0, 80, 1.3), ("C", 3.0, 80, 2.8), ("D", 6.0, 180, 6.0))
"""Name, speed over that of A, memory in GB, about what an hour costs: made up."""
RIGHT = Way()
TRAPS: dict[str, Callable[[Case], Way]] = {
    "middle": lambda case: Way(band=1.0),
    "lower": lambda case: Way(band=case.band[0]),
    "startup": lambda case: Way(startup=False),
    "failures": lambda case: Way(failures=False),
    "one GPU's failures": lambda case: Way(of_the_job=False),
    "one GPU's price": lambda case: Way(all_gpus=False),
    "memory": lambda case: Way(memory=False),
    "deadline": lambda case: Way(deadline=False),
    "budget": lambda case: Way(budget=False),
    "fastest": lambda case: Way(least="hours"),
    "cheapest hour": lambda case: Way(least="money per hour"),
}
"""What can go wrong, by name."""

Plan = tuple[str, float, float] | None
"""(name of the option, hours, money), or None where none is certain."""


def promise(case: Case, option: Option, way: Way = RIGHT) -> tuple[float, float]:
    """(hours, money) that `option` takes."""
    lost = 0.0
    if way.failures:
        mtbf_s = HOUR_S * option.gpu_mtbf_h / (option.gpus if way.of_the_job else 1)
        lost = _least_lost(option.save_s, mtbf_s, option.restart_s)
    band = case.band[1] if way.band is None else way.band
    hours = band * case.steps * option.step_s / HOUR_S / (1 - lost) + way.startup * option.startup_h
    return hours, hours * option.price * (option.gpus if way.all_gpus else 1)


@cache
def _least_lost(save_s: float, mtbf_s: float, restart_s: float) -> float:
    return lost_share(optimum(save_s, mtbf_s), save_s, mtbf_s, restart_s)


def fits(option: Option) -> bool:
    """Whether its memory is enough."""
    return option.needs_gb <= option.memory_gb


def chosen(case: Case, way: Way = RIGHT) -> Plan:
    """The plan that is made in this way."""
    safe = []
    for o in case.options:
        hours, money = promise(case, o, way)
        in_time, affordable = hours <= case.deadline_h or not way.deadline, money <= case.budget or not way.budget
        if (fits(o) or not way.memory) and in_time and affordable:
            small = {"money": money, "hours": hours, "money per hour": money / hours}[way.least]
            safe.append((small, o.name, hours, money))
    return min(safe)[1:] if safe else None


@cache
def case(seed: int) -> Case:
    """A case whose plan is clear. Of as many seeds in a row as there are traps, each is wrong for one of them."""
    names = list(TRAPS)
    trap = random.Random(seed // len(names)).sample(names, len(names))[seed % len(names)]
    dice = random.Random(seed)
    while True:
        found = _drawn(dice)
        right, wrong = chosen(found), chosen(found, TRAPS[trap](found))
        differs = (right and right[0]) != (wrong and wrong[0])
        # Without a budget there is no plan in some cases; in all others there is one
        if differs and (right is not None or trap in ("budget", "deadline")) and _is_clear(found):
            return found


def _drawn(dice: random.Random) -> Case:
    work_s = dice.uniform(2e6, 1.2e8)  # GPU-seconds on the slowest card
    steps = dice.choice((20_000, 50_000, 100_000, 200_000))
    options = []
    for card, speed, memory, price in CARDS:
        for gpus in dice.sample((16, 64, 128, 512, 2048), 2):
            efficiency = dice.uniform(0.75, 1.0) / (1 + gpus / 8000)
            options.append(
                Option(
                    f"{gpus} x {card}",
                    gpus,
                    round(price * dice.uniform(0.7, 1.4), 2),
                    float(f"{work_s / steps / gpus / speed / efficiency:.3g}"),
                    float(dice.choice((30, 45, 60, 75))),
                    float(memory - 2),
                    dice.choice((0.2, 0.5, 1.0, 4.0)),
                    float(dice.choice((5_000, 20_000, 50_000))),
                    float(dice.choice((30, 60, 120))),
                    float(dice.choice((300, 600, 1200))),
                )
            )
    band = (round(dice.uniform(0.8, 0.95), 2), round(dice.uniform(1.15, 1.6), 2))
    made = Case(tuple(options), steps, band, 0.0, 0.0)
    promised = [promise(made, o) for o in options if fits(o)]
    hours, money = zip(*promised, strict=True) if promised else ((1.0,), (1.0,))
    deadline, budget = (dice.choice(sorted(x)) * dice.uniform(0.75, 1.5) for x in (hours, money))
    return replace(made, deadline_h=float(f"{deadline:.3g}"), budget=float(f"{budget:.3g}"))


def _is_clear(found: Case) -> bool:
    """No limit is met or missed narrowly, and the best is not nearly equal to the second."""
    promised = [promise(found, o) for o in found.options if fits(o)]
    near = any(abs(h / found.deadline_h - 1) < CLEAR or abs(m / found.budget - 1) < CLEAR for h, m in promised)
    money = sorted(m for h, m in promised if h <= found.deadline_h and m <= found.budget)
    return not near and (len(money) < 2 or money[1] > (1 + CLEAR) * money[0])


def show(found: Case) -> None:
    """Print a case: a line for each option."""
    low, high = found.band
    print(
        f"{found.steps:,} steps within {found.deadline_h:g} h and for {found.budget:,.0f}; "
        f"a step takes {low:g} to {high:g} times the modelled seconds"
    )
    for o in found.options:
        print(
            f"  {o.name:>8}: {o.step_s:6.3g} s per step, {o.price:.2f} per GPU and hour, needs {o.needs_gb:g} of "
            f"{o.memory_gb:g} GB, starts in {o.startup_h:g} h, a GPU fails every {o.gpu_mtbf_h:,.0f} h"
        )
