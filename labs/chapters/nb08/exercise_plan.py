"""Exercise 08.3: plan a training under a deadline and a budget, and defend the plan against the model's own error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labs.chapters.nb08 import plan_cases as cases
from labs.chapters.nb08.plan_cases import TRAPS, Case, Plan, chosen, promise
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake
from labs.parts.checkpoints.checkpoint_interval import lost_share, optimum

SEEDS = range(300, 300 + 2 * len(TRAPS))  # each trap twice
TOLERANCE = 0.01  # relative: intervals of Young, Daly and the exact one lose nearly the same

TASK = """
Write `plan(options, steps, band, deadline_h, budget)`: the option to book, and what you promise. Return its name, its
hours and its money, or `None` if no option is certain. *Certain* means: in time and within budget although a step may
take `band[1]` times the modelled seconds, with the start-up (paid, and known: the band is that of a step), with
checkpoints at the best interval and failures (any GPU stops the job), in the memory that there is. Of the certain ones,
take the one with the least money. Hours and money are those of the upper end: what you would sign.
"""
HINTS = (
    "one option at a time: hours first, then money = hours x GPUs x price, then every reason to refuse it",
    "checkpoint_interval.optimum(save_s, mtbf_s) and checkpoint_interval.lost_share(interval_s, save_s, mtbf_s, "
    "restart_s): what is left to training is 1 minus that share",
    "the mean time between failures of a job is that of a GPU divided by its GPUs, and both functions want seconds",
)


def plan(
    options: tuple[cases.Option, ...], steps: int, band: tuple[float, float], deadline_h: float, budget: float
) -> Plan:
    """The option with the least money of those that keep both limits at the upper end of the band, or None."""
    safe = []
    for o in options:
        if o.needs_gb > o.memory_gb:
            continue
        mtbf_s = 3600 * o.gpu_mtbf_h / o.gpus  # any GPU stops the job
        lost = lost_share(optimum(o.save_s, mtbf_s), o.save_s, mtbf_s, o.restart_s)
        hours = o.startup_h + band[1] * steps * o.step_s / 3600 / (1 - lost)
        money = hours * o.gpus * o.price  # from the first paid hour on, idle or not
        if hours <= deadline_h and money <= budget:
            safe.append((money, hours, o.name))
    if not safe:
        return None
    money, hours, name = min(safe)
    return name, hours, money


SLIPS = {
    "middle": (
        "you plan with the middle of the band, and the model says itself that it may be wrong",
        "multiply the modelled seconds by band[1], the upper end",
    ),
    "lower": (
        "you plan with the lower end of the band: that is the hope, not the promise",
        "band[1] is the upper end: seconds can be more, not only less",
    ),
    "startup": (
        "you forget the start-up: GPUs are paid from the first hour on, also while they wait",
        "add startup_h to the hours before money and deadline are looked at",
    ),
    "failures": (
        "you forget checkpoints and failures: part of the wall clock brings training no further",
        "divide the running time by 1 minus checkpoint_interval.lost_share(...)",
    ),
    "one GPU's failures": (
        "you let the whole job fail as rarely as one GPU does",
        "any GPU stops the job: its mean time between failures is that of a GPU over the GPUs",
    ),
    "one GPU's price": (
        "you pay for one GPU only: the price is that of one GPU for one hour",
        "money = hours x GPUs x price",
    ),
    "memory": (
        "you book options whose memory is too small: that training ends in its first step",
        "leave out options with needs_gb above memory_gb",
    ),
    "deadline": ("you book the cheapest, whatever the deadline", "leave out what takes longer than deadline_h"),
    "budget": ("you book options that cost more than there is", "return None if nothing is certain: that is an answer"),
    "fastest": (
        "you book the fastest that is possible: nobody pays for being early",
        "least money of those that are certain",
    ),
    "cheapest hour": (
        "you make the price of an hour small, not that of the result: slow GPUs take more hours",
        "compare hours x GPUs x price",
    ),
}


def check_plan(f: Callable[..., Any]) -> None:
    """All cases right; else the mistake that explains all answers, else the first wrong one and what is wrong in it."""
    found = {seed: cases.case(seed) for seed in SEEDS}
    got = {seed: _answer(f(c.options, c.steps, c.band, c.deadline_h, c.budget)) for seed, c in found.items()}
    if all(_distance(got[seed], chosen(c)) <= TOLERANCE for seed, c in found.items()):
        return
    told = {
        name: max(_distance(got[seed], chosen(c, way(c))) for seed, c in found.items()) for name, way in TRAPS.items()
    }
    nearest = min(told, key=told.__getitem__)
    if told[nearest] <= TOLERANCE:
        raise Mistake(*SLIPS[nearest])
    seed = next(seed for seed, c in found.items() if _distance(got[seed], chosen(c)) > TOLERANCE)
    raise Mistake(f"case({seed}): {_attack(found[seed], got[seed])}", HINTS[0])


def _answer(value: Any) -> Plan:
    if value is None:
        return None
    try:
        name, hours, money = value
    except (TypeError, ValueError):
        raise Mistake(f"you return {value!r:.60}", "return name, hours, money; or None if nothing is certain") from None
    return str(name), number(hours, "12.5"), number(money, "900")


def _distance(a: Plan, b: Plan) -> float:
    """Largest relative difference of hours and money; infinite for different options."""
    if a is None or b is None or a[0] != b[0]:
        return 0.0 if a is b else math.inf
    return max(abs(x - y) / y for x, y in zip(a[1:], b[1:], strict=True))


def _attack(case: Case, got: Plan) -> str:
    """What is wrong with this answer, as somebody says who has to pay for it."""
    right = chosen(case)
    if got is None:
        return f"you book nothing, and {right[0]} is certain: {right[1]:.4g} h, {right[2]:,.0f}"
    option = next((o for o in case.options if o.name == got[0]), None)
    if option is None:
        return f"{got[0]!r:.40} is no option"
    hours, money = promise(case, option)
    told = f"at the upper end {option.name} takes {hours:.4g} h and {money:,.0f}"
    if not cases.fits(option):
        return f"{option.name} has {option.memory_gb:g} GB, and training needs {option.needs_gb:g} GB"
    if hours > case.deadline_h:
        return f"{told}, and there are {case.deadline_h:g} h"
    if money > case.budget:
        return f"{told}, and there is {case.budget:,.0f}"
    if option.name != right[0]:
        return f"{told}; {right[0]} is certain, too, for {right[2]:,.0f}"
    return f"{told}, and you promise {got[1]:.4g} h and {got[2]:,.0f}"


EXERCISES = {"08.3": Exercise("a training planned under a deadline and a budget", check_plan, plan)}
