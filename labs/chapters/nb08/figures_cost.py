"""Figures, tables and sentences of notebook 08 on cost: cards by their datasheets, two divisions, offers and limits."""

from __future__ import annotations

from dataclasses import replace

import pandas

from labs import cost
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import SERIES, figure, show
from labs.kit.record import Record, Records

EXAMPLE = (
    "A100 80GB SXM:64:1.5",
    "A100 80GB SXM:256:1.5",
    "H100 SXM:64:3",
    "H100 SXM:128:3",
    "H100 SXM:256:3",
    "H200 SXM:128:3.8",
    "L40S:256:0.9",
)
"""Offers with prices that are made up: examples, in no currency."""


# -- cards by their datasheets


# -- GPT-3 on eight A100


# -- offers and limits


def bills(config: cost.Config) -> pandas.DataFrame:
    """A row for each offer."""
    return cost.table(cost.bills(config))


def offers_figure(config: cost.Config, guess: Prediction) -> None:
    """Money against days, each offer with its band, and the limits."""
    every = cost.bills(config)
    found = [b for b in every if b.days]
    kept = cost.cheapest(found, config.deadline_days, config.budget)
    hopeful = cost.cheapest([_hoped(b) for b in found], config.deadline_days, config.budget)
    message = "At the band's upper end no offer keeps the limits"
    if kept:
        message = f"The cheapest at the band's upper end that keeps the limits there: {kept.offer}"
    fig, ax = figure(
        message,
        xlabel="days until it is done",
        ylabel="money (unit of the prices)",
        records=_records(found),
        legend_below=True,
    )
    cards = list(dict.fromkeys(b.offer.card for b in found))
    for card, color in zip(cards, SERIES, strict=False):
        own = [b for b in found if b.offer.card == card]
        for b in own:
            ax.plot([b.days.low, b.days.high], [b.money.low, b.money.high], "-", color=color, alpha=0.4)
            ax.annotate(
                f"{b.offer.gpus}",
                (b.days.value, b.money.value),
                textcoords="offset points",
                xytext=(6, -12) if cards.index(card) % 2 == 0 else (-6, 6),
                fontsize=10,
                color=color,
                ha="left" if cards.index(card) % 2 == 0 else "right",
            )
        ax.plot([], [], "o", color=color, label=f"{card}, modelled")  # the legend's: full, whatever its offers are
        for b in own:
            face = color if cost.within(b, config.deadline_days, config.budget) else "white"
            (drawn,) = ax.plot(b.days.value, b.money.value, "o", color=color, markerfacecolor=face)
            drawn.set_gid("kind:modelled")
    if config.deadline_days:
        ax.axvline(config.deadline_days, linestyle=":", color="black")
        ax.annotate(" deadline", (config.deadline_days, ax.get_ylim()[1]), va="top", fontsize=10)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + "; ".join(f"{b.offer}: {b.days} days for {b.money}" for b in found) + ".")
    said = [
        "Lines are the band of the model; an offer whose dot is hollow does not keep the limits at its upper end.",
        *dict.fromkeys(f"Band for {b.estimate.band}." for b in found),
        *(f"Not drawn: {b.offer}, {b.refusal}" for b in every if not b.days),
    ]
    if kept:
        said.append(f"{kept.offer} takes {kept.days} days and {kept.money}; {_share(kept)}")
        said.append(guess.against(kept.money.value, "modelled"))
        said.append(_undecided(found, kept, config))
    if hopeful and (not kept or hopeful.offer != kept.offer):
        said.append(f"By the middle of the band alone one would book {hopeful.offer}, which may not keep them.")
    say("\n".join(f"* {line}" for line in said))


def _undecided(found: list[cost.Bill], kept: cost.Bill, config: cost.Config) -> str:
    """Which other offers that keep the limits may be cheaper, for all that the model knows."""
    rivals = [b for b in found if b is not kept and cost.within(b, config.deadline_days, config.budget)]
    near = [str(b.offer) for b in rivals if b.money.low < kept.money.high]
    if not rivals:
        return "No other offer keeps the limits at its upper end."
    if not near:
        return "No other offer that keeps the limits comes near it: the bands do not touch."
    return (
        f"Whether it is the cheapest the model cannot tell for certain: the bands of {', '.join(near)} overlap its "
        "own. It is the one to ask about first."
    )


def _hoped(b: cost.Bill) -> cost.Bill:
    """The same bill, as if the model never erred."""
    return replace(b, days=cost.Range(b.days.value, b.days.value, b.days.value))


def _share(b: cost.Bill) -> str:
    return (
        f"checkpoints and failures take {b.lost_share:.1%} of the time, the largest part of a step is "
        f"{b.estimate.step.limit()}."
    )


def _records(found: list[cost.Bill]) -> Records:
    return Records(Record("cost", "days", "days", (b.days.value,), "modelled", {"offer": str(b.offer)}) for b in found)
