"""Typical mistakes in exercise 08.3: {mistake: (function, words that its feedback must hold)}."""

from __future__ import annotations

from labs.parts.checkpoints.checkpoint_interval import lost_share, optimum


def planner(
    band=lambda b: b[1],
    startup=True,
    lost=True,
    ranks=lambda o: o.gpus,
    paid=lambda o: o.gpus,
    memory=True,
    limits=True,
    least=lambda hours, money: money,
    hours_only=False,
):
    """A plan that is right by default, with as many mistakes as there are arguments."""

    def plan(options, steps, given, deadline_h, budget):
        found = []
        for o in options:
            mtbf_s = 3600 * o.gpu_mtbf_h / ranks(o)
            share = lost_share(optimum(o.save_s, mtbf_s), o.save_s, mtbf_s, o.restart_s) if lost else 0.0
            hours = band(given) * steps * o.step_s / 3600 / (1 - share) + (o.startup_h if startup else 0.0)
            money = hours * paid(o) * o.price
            if memory and o.needs_gb > o.memory_gb:
                continue
            if hours <= deadline_h and (money <= budget or not limits):
                found.append((least(hours, money), o.name, hours, money))
        return min(found)[1:] if found else None

    return plan


def _whatever_the_deadline(options, steps, band, deadline_h, budget):
    return planner()(options, steps, band, float("inf"), budget)


MUTANTS = {
    "08.3": {
        "forgets the band": (planner(band=lambda b: 1.0), "the middle of the band"),
        "forgets the start-up": (planner(startup=False), "also while they wait"),
        "forgets failures": (planner(lost=False), "brings training no further"),
        "one GPU's failures": (planner(ranks=lambda o: 1), "as rarely as one GPU does"),
        "exceeds memory": (planner(memory=False), "ends in its first step"),
        "forgets the budget": (planner(limits=False), "cost more than there is"),
        "the price of an hour": (planner(least=lambda h, m: m / h), "not that of the result"),
        "the fastest": (planner(least=lambda h, m: h), "nobody pays for being early"),
    },
}
MORE = {
    "hopes": (planner(band=lambda b: b[0]), "that is the hope"),
    "pays one GPU": (planner(paid=lambda o: 1), "money = hours x GPUs x price"),
    "late": (_whatever_the_deadline, "whatever the deadline"),
}
"""Beyond the eight that the tests of all exercises take."""
