"""What does this training cost: days, GPU-hours, energy, money - and which offer is the cheapest that is done in time?

    python -m labs.cost --params 7e9 --tokens 1.4e11 --offers "H100 SXM:64" "A100 80GB SXM:128"
    python -m labs.cost --offers "H100 SXM:64:2.5" "A100 80GB SXM:128:1.2" --deadline-days 10 --budget 60000
    python -m labs.cost --params 1.75e11 --tokens 3e11 --offers "A100 80GB SXM:8" "A100 80GB SXM:1024"

Takes a second: nothing is trained. An offer is CARD:GPUS or CARD:GPUS:PRICE. No price is built in: PRICE is what you
are asked for one GPU for one hour, in any money, as long as it is the same for all offers. Those above are made up.

Time is that of labs/common/planning/scaling.py, with start-up, checkpoints and failures; every number has that model's
error on published runs as its band. Memory is that of labs/common/planning/parallel_cost.py.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pandas

from labs.common.planning import blind_test, calibration, parallel_cost, scaling
from labs.common.planning.blind_test import Band
from labs.common.planning.parallel_cost import Job, Machine, Plan, shape
from labs.kit import cli, hardware
from labs.kit.errors import BadInput, naming, require

DAY_S, HOUR_S = 86_400.0, 3_600.0
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556, as their table 3 is usually rounded
LARGEST = 1e14  # parameters
REACHED = 0.4  # of the dense peak, for a card of which no published run is known here: an assumption, told as one


@dataclass(frozen=True)
class Offer:
    """GPUs that can be had."""

    card: str
    """As in labs/kit/gpus.toml."""
    gpus: int
    price: float | None = None
    """Of one GPU for one hour, in the unit of all prices; None if it is not known."""

    @classmethod
    def of(cls, text: str) -> Offer:
        """From "CARD:GPUS" or "CARD:GPUS:PRICE". BadInput, with the form that is wanted, for anything else."""
        form = f'offers: an offer is "CARD:GPUS" or "CARD:GPUS:PRICE", such as "H100 SXM:64", not {text!r}'
        parts = text.split(":")
        require(2 <= len(parts) <= 3, form)
        try:
            offer = cls(parts[0].strip(), int(parts[1]), float(parts[2]) if len(parts) == 3 else None)
        except ValueError:
            raise BadInput(form) from None
        require(1 <= offer.gpus <= 1_000_000, f"offers: an offer has 1 to 1,000,000 GPUs, not {offer.gpus}")
        price = offer.price
        require(
            price is None or 0 < price < math.inf, f"offers: a price is positive, not {price}: leave it out if unknown"
        )
        with naming("offers"):
            row = hardware.require_spec(offer.card)
        require(
            bool(row.memory_gb and row.link_gb_s and (row.tensor_bf16 or row.tensor_fp16)),
            f"offers: memory, link or 16-bit peak of the {row.gpu} have no source in gpus.toml",
        )
        return replace(offer, card=row.gpu)

    def __str__(self) -> str:
        return f"{self.gpus} x {self.card}"


@dataclass(frozen=True)
class Config:
    """The training, the offers, the limits."""

    params: float = 7e9
    """Parameters of the transformer."""
    tokens: float = 0.0
    """Tokens to train on; 0: 20 for each parameter."""
    batch: int = 1024
    """Sequences per optimizer step, over all GPUs."""
    seq: int = 2048
    """Tokens per sequence."""
    layers: int = 0
    """Layers; 0: as many as `params` suggests. The shape decides which tensor-parallel plans there are."""
    hidden: int = 0
    """Hidden size; 0: that which `params` suggests. Heads have 64 numbers; tensor parallelism cuts between them."""
    offers: tuple[str, ...] = ("H100 SXM:64", "A100 80GB SXM:128")
    """Each CARD:GPUS or CARD:GPUS:PRICE, with the price of one GPU for one hour."""
    gpus_per_node: int = 8
    """GPUs of a machine."""
    network_gb_s: float = 25.0
    """Bandwidth of one GPU to other machines, one direction, in 10^9 bytes/s."""
    reached: float = 0.0
    """Share of the card's dense 16-bit peak that one GPU reaches, by a step of this model that you have timed.

    0: what published runs of other models reach on the card, else 0.4; the band is wider then.
    """
    startup_min: float = 15.0
    """Minutes from the first paid one to the first step; GPUs are paid while they wait for it."""
    gpu_mtbf_days: float = 2112.0
    """Mean days between failures of one GPU. Llama 3: 419 in 54 days on 16,384 (arXiv:2407.21783). 0: none fails."""
    save_s: float = 60.0
    """Seconds for which training stops to save."""
    restart_min: float = 10.0
    """Minutes from a failure until training goes on."""
    power_factor: float = 1.0
    """All energy over that of the GPUs' boards at their limit: hosts, network, cooling. 1: the boards alone."""
    reserved_gb: float = 2.0
    """Memory of each GPU that training cannot have, in 10^9 bytes."""
    deadline_days: float = 0.0
    """The training has to be done by then; 0: there is time."""
    budget: float = 0.0
    """Money that there is, in the unit of the prices; 0: enough."""

    def __post_init__(self) -> None:
        for name in ("params", "batch", "seq", "gpus_per_node"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name):g}")
        for name in (
            "tokens",
            "startup_min",
            "gpu_mtbf_days",
            "save_s",
            "restart_min",
            "reserved_gb",
            "deadline_days",
            "budget",
            "layers",
            "hidden",
        ):
            require(0 <= getattr(self, name) < math.inf, f"{name} must not be negative: {getattr(self, name):g}")
        require(self.params <= LARGEST, f"params must be at most {LARGEST:g}, not {self.params:g}")
        require(self.network_gb_s > 0, f"network_gb_s must be positive, not {self.network_gb_s:g}")
        require(0 <= self.reached <= 1, f"reached is a share of the peak, at most 1, not {self.reached:g}")
        require(self.power_factor >= 1, f"power_factor must be at least 1, the boards alone, not {self.power_factor:g}")
        require(len(self.offers) > 0, 'offers must name at least one, such as "H100 SXM:64"')
        for offer in self.parsed():
            free = hardware.spec(offer.card).memory_gb - self.reserved_gb
            require(free > 0, f"reserved_gb leaves no memory on the {offer.card}: lower it by {-free:g} at least")
        priced = [offer.price is not None for offer in self.parsed()]
        require(not self.budget or all(priced), "a budget needs a price in every offer: CARD:GPUS:PRICE")

    def parsed(self) -> list[Offer]:
        """The offers."""
        return [Offer.of(text) for text in self.offers]

    def job(self) -> Job:
        """The model, with the shape that was given or that its size suggests."""
        layers, hidden = shape(self.params)
        return Job(self.params, self.batch, self.seq, self.layers or layers, self.hidden or hidden, 50257)

    @property
    def steps(self) -> float:
        """Optimizer steps of the training."""
        return (self.tokens or TOKENS_PER_PARAMETER * self.params) / (self.batch * self.seq)

    @property
    def error(self) -> Band:
        """The model's error: narrower if `reached` was given, which should be that of a timed step of this model."""
        return blind_test.band() if self.reached else blind_test.band_across()

    def share_of_peak(self, card: str) -> tuple[float, str]:
        """(what a GPU reaches over its dense peak, where that comes from)."""
        if self.reached:
            return self.reached, "given"
        return calibration.reached(card) or (REACHED, "assumed")


@dataclass(frozen=True)
class Range:
    """A modelled number and the band that the model's error gives it: eight in ten published runs are within."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        """All three, `factor` times."""
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{_short(self.value)} ({_short(self.low)} to {_short(self.high)})"


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.2g}"


@dataclass(frozen=True)
class Bill:
    """What a training on an offer takes. All of it is modelled."""

    offer: Offer
    plan: Plan
    memory_bytes: float
    """Of the fullest GPU, at its peak."""
    step: scaling.Step
    training: scaling.Training
    seconds: Range
    """From the first paid second to the last step: start-up, steps, checkpoints, failures."""
    power_w: float
    """Of one GPU, its board's limit, with what goes with it."""

    @property
    def days(self) -> Range:
        """How long one waits."""
        return self.seconds.times(1 / DAY_S)

    @property
    def gpu_hours(self) -> Range:
        """What is paid for, used or not."""
        return self.seconds.times(self.offer.gpus / HOUR_S)

    @property
    def energy_kwh(self) -> Range:
        """Of boards at their limit all the time, so rather too much; 1 kWh is 3.6 million joules."""
        return self.gpu_hours.times(self.power_w / 1e3)

    @property
    def money(self) -> Range | None:
        """GPU-hours times their price; None without a price."""
        return None if self.offer.price is None else self.gpu_hours.times(self.offer.price)


def cluster_of(config: Config, offer: Offer) -> scaling.Cluster:
    """The GPUs of `offer` with what start-up, failures and saving take."""
    found = scaling.of_card(
        offer.card, offer.gpus, config.gpus_per_node, config.network_gb_s, config.share_of_peak(offer.card)[0]
    )
    return replace(
        found,
        startup_s=60 * config.startup_min,
        gpu_mtbf_s=DAY_S * config.gpu_mtbf_days or math.inf,
        save_s=config.save_s,
        restart_s=60 * config.restart_min,
    )


def bill(config: Config, offer: Offer) -> Bill | None:
    """The fastest plan that fits into the memory of `offer`, and what it takes; None if none fits."""
    row, job, cluster = hardware.spec(offer.card), config.job(), cluster_of(config, offer)
    free = 1e9 * (row.memory_gb - config.reserved_gb)
    machine = Machine(offer.gpus, free, cluster.flop_s, cluster.inside.bytes_s)
    fitting = [c for c in parallel_cost.costs(job, machine) if c.memory_bytes <= free and c.plan.ranks == offer.gpus]
    if not fitting:
        return None
    work = scaling.Work.of(job)
    chosen = min(fitting, key=lambda c: scaling.step(work, cluster, c.plan).step_s)
    training = scaling.training(work, cluster, config.steps, chosen.plan)
    return Bill(
        offer,
        chosen.plan,
        chosen.memory_bytes,
        scaling.step(work, cluster, chosen.plan),
        training,
        with_band(training, config.error),
        config.power_factor * (row.tdp_w or math.nan),
    )


def with_band(training: scaling.Training, error: Band) -> Range:
    """Seconds from the start to the last step. The band is that of a step: start-up is a given number and has none."""
    running = training.total_s - training.startup_s
    return Range(*(training.startup_s + factor * running for factor in (1.0, error.low, error.high)))


def bills(config: Config) -> list[Bill | None]:
    """One for each offer, in their order."""
    return [bill(config, offer) for offer in config.parsed()]


def within(found: Bill, deadline_days: float = 0.0, budget: float = 0.0, certain: bool = True) -> bool:
    """Whether it is done in time and within budget: at the upper end of the band if that has to be certain."""
    end = (lambda r: r.high) if certain else (lambda r: r.value)
    late = deadline_days and end(found.days) > deadline_days
    dear = budget and (found.money is None or end(found.money) > budget)
    return not (late or dear)


def cheapest(found: Sequence[Bill | None], deadline_days: float = 0.0, budget: float = 0.0) -> Bill | None:
    """Least money (GPU-hours if an offer has no price) of those that keep both limits at the upper end of the band."""
    fit = [b for b in found if b and within(b, deadline_days, budget)]
    priced = all(b.money for b in fit)
    return min(fit, key=lambda b: b.money.high if priced else b.gpu_hours.high, default=None)


def table(found: Sequence[Bill | None], offers: Sequence[Offer]) -> pandas.DataFrame:
    """A row for each offer."""
    rows = []
    for offer, b in zip(offers, found, strict=True):
        if b is None:
            rows.append({"offer": str(offer), "plan": "no plan fits into its memory"})
            continue
        money = {"money": str(b.money)} if b.money else {}
        rows.append(
            {
                "offer": str(offer),
                "plan": str(b.plan),
                "GB per GPU": f"{b.memory_bytes / 1e9:.0f}",
                "days (band)": str(b.days),
                "GPU-hours": str(b.gpu_hours),
                "MWh": str(b.energy_kwh.times(1e-3)),
                **money,
            }
        )
    return pandas.DataFrame(rows).set_index("offer").fillna("")


def answer(config: Config) -> Iterator[str]:
    """Which offer to take, what it costs, what it costs beside the steps, and how sure that is."""
    found = bills(config)
    kept = cheapest(found, config.deadline_days, config.budget)
    limits = [f"in {config.deadline_days:g} days"] * bool(config.deadline_days)
    limits += [f"for {config.budget:g}"] * bool(config.budget)
    asked = " and ".join(limits) or "without limits"
    if kept is None:
        yield f"At the band's upper end no offer trains {config.params:.3g} parameters {asked}."
        yield _nearest(found, config)
    else:
        money = f", {kept.money} of your money" if kept.money else ""
        boards = " on the boards" if config.power_factor == 1 else f", {config.power_factor:g} times that of the boards"
        fit = [b for b in found if b and within(b, config.deadline_days, config.budget)]
        least = "Cheapest"
        if len(fit) > 1 and not all(b.money for b in fit):
            least = "Fewest GPU-hours (which is cheapest takes a price in every offer, CARD:GPUS:PRICE)"
        yield (
            f"{least} {asked}, at the band's upper end: {kept.offer}, {kept.days} days, {kept.gpu_hours} "
            f"GPU-hours{money}, {kept.energy_kwh.times(1e-3)} MWh at most{boards}."
        )
        share, started = kept.training.lost_share, kept.training.startup_s / kept.training.total_s
        yield (
            f"Trained as: {kept.plan}. The largest part of a step is {kept.step.limit()}; checkpoints and "
            f"failures take {share:.1%} of the time, start-up {started:.1%}."
        )
    yield from _undivided(config)
    yield from arithmetic(config)
    yield str(config.error)


def _undivided(config: Config) -> list[str]:
    """Of each number of GPUs that the batch does not divide by: what was not considered for it."""
    counts = dict.fromkeys(offer.gpus for offer in config.parsed())
    return [why for gpus in counts if (why := parallel_cost.undivided(config.batch, gpus))]


def _nearest(found: Sequence[Bill | None], config: Config) -> str:
    fit = [b for b in found if b]
    if not fit:
        considered = ", in the plans that share the batch evenly" if _undivided(config) else ""
        return f"None has the memory{considered}."
    hopeful = [b for b in fit if within(b, config.deadline_days, config.budget, certain=False)]
    if hopeful:
        return f"In the middle of the band these would: {', '.join(str(b.offer) for b in hopeful)}."
    first = min(fit, key=lambda b: b.seconds.value)
    return f"The fastest is {first.offer}: {first.days} days, {first.gpu_hours} GPU-hours."


def arithmetic(config: Config) -> Iterator[str]:
    """What each card is taken to reach of its peak, where that comes from, and whose links are a best case."""
    for card in dict.fromkeys(offer.card for offer in config.parsed()):
        share, origin = config.share_of_peak(card)
        unsure = ", which the band does not cover" if origin == "assumed" else ""
        yield f"{card}: taken to reach {share:.0%} of its dense 16-bit peak ({origin}{unsure})."
        if unlinked := scaling.without_peer_to_peer(card):
            yield f"{unlinked} Taken here: {scaling.REACHED:.0%} of PCIe's datasheet."


def main() -> None:
    """Entry point of the command line."""
    prog = "python -m labs.cost"
    config = cli.parse_config(Config, __doc__, prog)
    try:
        said = [*answer(config)]
    except BadInput as e:  # of values that are plausible one by one
        cli.fail(prog, str(e))
    with cli.closed_pipe_is_no_error():
        for sentence in said:
            print(textwrap.fill(sentence, 100, subsequent_indent="  "))
        print("\nAll of this is modelled:")
        print(table(bills(config), config.parsed()).to_string())


if __name__ == "__main__":
    main()
