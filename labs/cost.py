"""What does a training run cost: days, GPU-hours, money, and which offer is the cheapest that is done in time?

    python -m labs.cost --params 7e9 --tokens 1.4e11 --offers "H100 SXM:64" "A100 80GB SXM:128"
    python -m labs.cost --offers "H100 SXM:64:2.5" "A100 80GB SXM:128:1.2" --deadline-days 10 --budget 60000

Takes a second: nothing is trained. An offer is CARD:GPUS or CARD:GPUS:PRICE. No price is built in: PRICE is what you
are asked for one GPU for one hour, in any currency. Plans and times are those of labs.strategy, with start-up,
checkpoints and failures; where published runs support no error band, an offer gets no days and no price.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import pandas
from annotated_types import Ge, Le

from labs.common.checkpoints import checkpoint_interval
from labs.common.cost_model import cards, choose, published
from labs.common.cost_model.jobs import JobConfig
from labs.common.cost_model.published import Estimate, Range
from labs.common.cost_model.seconds import Cluster, Work
from labs.kit import cli
from labs.kit.errors import BadInput, naming, require
from labs.kit.lab import require_limits

DAY_S = 86_400.0
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556, as their table 3 is usually rounded


@dataclass(frozen=True)
class Offer:
    """GPUs that you can have."""

    card: str
    gpus: int
    price: float | None = None
    """Of one GPU for one hour, in the currency of all prices; None if you don't know it."""

    @classmethod
    def of(cls, text: str) -> Offer:
        """From "CARD:GPUS" or "CARD:GPUS:PRICE". BadInput for anything else."""
        form = f'an offer is "CARD:GPUS" or "CARD:GPUS:PRICE", such as "H100 SXM:64", not {text!r}'
        parts = text.split(":")
        require(2 <= len(parts) <= 3, form)
        try:
            gpus, price = int(parts[1]), float(parts[2]) if len(parts) == 3 else None
        except ValueError:
            raise BadInput(form) from None
        require(1 <= gpus <= 1_000_000, f"an offer has 1 to 1,000,000 GPUs, not {gpus}")
        require(price is None or 0 < price < math.inf, f"a price is more than 0, not {price}; leave it out if unknown")
        return cls(cards.require_card(parts[0].strip()).gpu, gpus, price)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.card}"


@dataclass(frozen=True)
class Config(JobConfig):
    """The training run, the offers, the limits."""

    batch: Annotated[int, Ge(1)] = 1024
    """Sequences per optimizer step, over all GPUs."""
    tokens: Annotated[float, Ge(0)] = 0.0
    """Tokens to train on. Default: 20 for each parameter."""
    offers: tuple[str, ...] = ("H100 SXM:64", "A100 80GB SXM:128")
    """Each CARD:GPUS or CARD:GPUS:PRICE, with the price of one GPU for one hour."""
    reached: Annotated[float, Ge(0), Le(1)] = 0.0
    """Share of the card's dense 16-bit peak in a step of yours. Default: what a published run reached on the card."""
    startup_min: Annotated[float, Ge(0)] = 15.0
    """Minutes from the first paid one to the first step."""
    gpu_mtbf_days: Annotated[float, Ge(0)] = 2112.0
    """Mean days between failures of one GPU. Llama 3: 419 in 54 days on 16,384 (arXiv:2407.21783). 0: none fails."""
    save_s: Annotated[float, Ge(0)] = 60.0
    """Training stops this long to save."""
    restart_min: Annotated[float, Ge(0)] = 10.0
    """Minutes from a failure until training resumes."""
    deadline_days: Annotated[float, Ge(0)] = 0.0
    """The run has to be done by then. 0: no deadline."""
    budget: Annotated[float, Ge(0)] = 0.0
    """Money that you have, in the currency of the prices. 0: no limit."""

    def __post_init__(self) -> None:
        require_limits(self)
        require(len(self.offers) > 0, 'offers must name at least one, such as "H100 SXM:64"')
        with naming("offers"):
            priced = [offer.price is not None for offer in self.parsed()]
        require(not self.budget or all(priced), "a budget needs a price in every offer: CARD:GPUS:PRICE")

    def parsed(self) -> list[Offer]:
        """The offers."""
        return [Offer.of(text) for text in self.offers]

    @property
    def steps(self) -> float:
        """Optimizer steps of the run."""
        return (self.tokens or TOKENS_PER_PARAMETER * self.params) / (self.batch * self.seq)

    def calibration(self, card: str) -> tuple[float, str]:
        """(share of its peak that the card reaches, where that comes from; "" for a guess)."""
        return (self.reached, "a step of yours") if self.reached else published.reached(card)


@dataclass(frozen=True)
class Bill:
    """What a run on an offer takes. All of it is modelled."""

    offer: Offer
    choice: choose.Cost | None = None
    estimate: Estimate | None = None
    lost_share: float = 0.0
    """Of the time after start-up: saving, work that failures throw away, restarts."""
    days: Range | None = None
    """From the first paid second to the last step; None if no plan fits or published runs support no band."""

    @property
    def refusal(self) -> str:
        """Why there are no days; "" if there are."""
        return self.estimate.refusal if self.estimate else "no plan fits into its memory"

    @property
    def gpu_hours(self) -> Range:
        """What you pay for, used or not."""
        return self.days.times(24 * self.offer.gpus)

    @property
    def money(self) -> Range | None:
        """GPU-hours times their price; None without a price."""
        return self.gpu_hours.times(self.offer.price) if self.offer.price else None


def cluster_of(config: Config, offer: Offer) -> Cluster:
    """The GPUs of `offer`."""
    spec = cards.require_card(offer.card)
    flop_s = config.calibration(offer.card)[0] * cards.peak_flop_s(spec)
    return cards.cluster(spec, offer.gpus, config.gpus_per_node, config.network_gb_s, flop_s)


def bill(config: Config, offer: Offer) -> Bill:
    """The plan that `labs.strategy` would use on all GPUs of `offer`, and what the run takes."""
    job, cluster = config.job, cluster_of(config, offer)
    using_all = (c for c in choose.costs(job, cluster) if c.plan.ranks == offer.gpus)
    choice = choose.best(using_all, choose.limit_bytes(cluster))
    if not choice:
        return Bill(offer)
    estimate = published.estimate(Work.of(job), cluster, choice.plan, config.calibration(offer.card)[1])
    share = lost_share(config, offer.gpus)
    return Bill(offer, choice, estimate, share, days(config, estimate.seconds, share))


def days(config: Config, step_s: Range | None, lost: float) -> Range | None:
    """Days of the whole run. The band is that of a step: start-up is a given number and has none."""
    if step_s is None:
        return None
    startup, running = config.startup_min * 60 / DAY_S, step_s.times(config.steps / (1 - lost) / DAY_S)
    return Range(startup + running.value, startup + running.low, startup + running.high)


def lost_share(config: Config, gpus: int) -> float:
    """Share of the time that saving and failures take, at the best interval between checkpoints."""
    if not config.gpu_mtbf_days:
        return 0.0
    mtbf = DAY_S * config.gpu_mtbf_days / gpus
    save = max(config.save_s, 1e-6 * mtbf)  # an interval of zero is no interval
    share = checkpoint_interval.lost_share(checkpoint_interval.optimum(save, mtbf), save, mtbf, 60 * config.restart_min)
    require(
        share < 1 - 1e-9,
        f"{gpus:,} GPUs fail every {mtbf:.3g} s, so with save_s {config.save_s:g} and restart_min "
        f"{config.restart_min:g} nothing is ever finished: take fewer GPUs, or shorten these",
    )
    return share


def bills(config: Config) -> list[Bill]:
    """One for each offer, in their order."""
    return [bill(config, offer) for offer in config.parsed()]


def within(found: Bill, deadline_days: float = 0.0, budget: float = 0.0) -> bool:
    """Whether it is done in time and within budget, at the upper end of the band."""
    late = deadline_days and found.days.high > deadline_days
    dear = budget and (found.money is None or found.money.high > budget)
    return not (late or dear)


def cheapest(found: Iterable[Bill], deadline_days: float = 0.0, budget: float = 0.0) -> Bill | None:
    """Least money (GPU-hours if an offer has no price) of those that keep both limits at the upper end of the band."""
    fit = [b for b in found if b.days and within(b, deadline_days, budget)]
    priced = all(b.money for b in fit)
    return min(fit, key=lambda b: b.money.high if priced else b.gpu_hours.high, default=None)


def table(found: Iterable[Bill]) -> pandas.DataFrame:
    """A row for each offer."""
    rows = []
    for b in found:
        row = {"offer": str(b.offer), "plan": str(b.choice.plan) if b.choice else "", "days (band)": "none"}
        if b.days:
            row |= {"days (band)": str(b.days), "GPU-hours": str(b.gpu_hours)}
            row |= {"money": str(b.money)} if b.money else {}
        rows.append(row)
    return pandas.DataFrame(rows).set_index("offer").fillna("")


def answer(config: Config, found: list[Bill]) -> list[str]:
    """Which offer to take, what it costs, and what that rests on."""
    kept = cheapest(found, config.deadline_days, config.budget)
    limits = [f"in {config.deadline_days:g} days"] * bool(config.deadline_days)
    limits = " and ".join(limits + [f"for {config.budget:g}"] * bool(config.budget)) or "without limits"
    lines = [f"No offer trains {config.params:.3g} parameters {limits}, at the upper end of its band."]
    if kept:
        money = f", {kept.money} of your money" if kept.money else ""
        by = "money" if kept.money else "GPU-hours"
        lines = [
            f"Least {by} {limits}, at the upper end of the band: {kept.offer}, {kept.days} days, {kept.gpu_hours} "
            f"GPU-hours{money}.",
            f"Plan: {kept.choice.plan}. The largest part of a step is {kept.estimate.step.limit()}; saving and "
            f"failures take {kept.lost_share:.1%} of the time.",
        ]
    lines += dict.fromkeys(f"Band for {b.estimate.band}. {published.BIAS}" for b in found if b.days)
    lines += [f"{b.offer}: {b.refusal}" for b in found if not b.days]
    return lines + [why for b in found if (why := choose.undivided(config.batch, b.offer.gpus))]


def main() -> None:
    """Entry point of the command line."""
    prog = "python -m labs.cost"
    config = cli.parse_config(Config, __doc__, prog)
    try:
        found = bills(config)
    except BadInput as e:  # of values that are plausible one by one
        cli.fail(prog, str(e))
    with cli.closed_pipe_is_no_error():
        for line in answer(config, found):
            print(textwrap.fill(line, 100, subsequent_indent="  "))
        print("\nAll of this is modelled:")
        print(table(found).to_string())


if __name__ == "__main__":
    main()
