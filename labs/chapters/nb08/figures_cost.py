"""Figures, tables and sentences of notebook 08 on cost: cards by their datasheets, two divisions, offers and limits."""

from __future__ import annotations

from dataclasses import replace

import pandas

from labs import cost
from labs.kit import hardware
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import SERIES, figure, show
from labs.kit.record import Record, Records
from labs.parts.planning import parallel_cost
from labs.parts.planning.calibration import GPT3

ARTICLE = (
    ("NVIDIA A100", "40/80 GB", 1555, "100 billion parameters", ("A100 40GB SXM", "A100 80GB SXM")),
    ("RTX 4090", "24 GB", 936, "development of small and medium models", ("RTX 4090",)),
    ("Tesla T4", "16 GB", 320, "inference, light training", ("T4",)),
)
"""The article's table (B, lines 38-41): card, memory, memory bandwidth in GB/s, what it is for; and our rows for it."""
GPT_3, GPT_3_TOKENS = 174.6e9, 300e9
GPT_3_SHAPE = {"layers": GPT3["layers"], "hidden": GPT3["hidden"]}
"""Brown et al. 2020, table 2.1. With the shape that 174.6e9 parameters suggest no tensor-parallel plan is possible."""
GPT_3_FLOP = 3.14e23
"""Of the whole training: Brown et al. 2020, arXiv:2005.14165, table D.1."""
NARAYANAN, NARAYANAN_TFLOPS = (1024, 34.0), 140
"""A100 80GB and days that Narayanan et al. 2021, arXiv:2104.04473, section 5.1, estimate from 140 TFLOP/s."""
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


def card_table() -> pandas.DataFrame:
    """The article's three cards: what it says, what the datasheets say, and what fits."""
    rows = []
    for name, memory, bandwidth, use, cards in ARTICLE:
        for card in cards:
            row = hardware.spec(card)
            pins = hardware.bus_bandwidth_gb_s(row.bus_bits, row.pin_gbit_s)
            rows.append(
                {
                    "card": card,
                    "the article says": f"{name}: {memory}, {bandwidth} GB/s, {use}",
                    "GB/s": f"{row.bandwidth_gb_s:,.0f}",
                    "pins x rate / 8": f"{pins:,.0f}",
                    "TFLOP/s, 16 bits, dense": f"{row.tflops('fp16'):g}",
                    "link": f"{row.link}, {row.link_gb_s:g} GB/s",
                    "W": f"{row.tdp_w:g}",
                    "parameters, Adam": f"{largest_alone(card) / 1e9:.1f} B",
                }
            )
    return pandas.DataFrame(rows).set_index("card")


def largest_alone(card: str) -> float:
    """Parameters whose states fit into one card, 16 bytes each, without any activation."""
    return hardware.spec(card).memory_gb * 1e9 / parallel_cost.STATE_BYTES


def sources_table() -> pandas.DataFrame:
    """Where each card's row comes from."""
    rows = {
        s.gpu: {"source": s.source, "address": s.url} for name in ARTICLE for c in name[4] if (s := hardware.spec(c))
    }
    return pandas.DataFrame(rows).T.rename_axis("card")


def card_text() -> None:
    """What the datasheets say against the article, in sentences."""
    wrong = hardware.spec("RTX 4090")
    other = next(s for s in hardware.specs() if s.bandwidth_gb_s == 936)
    a100 = hardware.spec("A100 80GB SXM")
    needs = 100e9 * parallel_cost.STATE_BYTES
    say(
        f"* The RTX 4090 has {wrong.bandwidth_gb_s:,.0f} GB/s; 936 is the {other.gpu}'s number.\n"
        f"* 1,555 GB/s is the A100 of 40 GB; that of 80 GB has {a100.bandwidth_gb_s:,.0f}.\n"
        f"* 100 billion parameters have {needs / 1e12:.1f} TB of states, which is the memory of "
        f"{needs / (a100.memory_gb * 1e9):.0f} A100 of 80 GB, before the first activation.\n"
        "* Bandwidth to memory decides what is limited by memory. What a training costs, it does not tell: arithmetic, "
        "links, memory and the price of an hour do."
    )


# -- GPT-3 on eight A100


def gpt_3_table(gpus: int = 8, card: str = "A100 80GB SXM") -> pandas.DataFrame:
    """The two divisions for GPT-3, in a row each."""
    found, slow = cost.divisions(GPT_3, GPT_3_TOKENS, card, gpus), published_days(gpus)
    shown = hardware.usable_bytes(card)
    rows = {
        "memory of all, as sold": f"{found.memory_bytes / 1e9:,.0f} GB",
        "the same as nvidia-smi prints it": f"{gpus * shown / 1e9:,.0f} GB" if shown else "not known",
        "weights in 16 bits alone": f"{found.weights_bytes / 1e9:,.0f} GB",
        "weights, gradients, Adam (16 bytes each)": f"{found.states_bytes / 1e9:,.0f} GB",
        "states over memory": f"{found.times_too_large:.1f} x",
        "cards for the states alone": f"{found.states_bytes / found.memory_bytes * gpus:.0f}",
        "FLOP, 6 N D": f"{found.flop:.3g} (published: {GPT_3_FLOP:g})",
        "days at the peak of all": f"{found.days():,.0f} ({found.days() / 365.25:.0f} years)",
        "days at the pace of the paper's 1,024": f"{slow:,.0f} ({slow / 365.25:.0f} years)",
    }
    return pandas.DataFrame({f"GPT-3 on {gpus} x {card}": rows})


def published_days(gpus: int) -> float:
    """Of GPT-3 on `gpus` A100, if they were as efficient as the published 1,024 (fewer would be a little more)."""
    many, days = NARAYANAN
    return days * many / gpus


def gpt_3_text(guess: Prediction, gpus: int = 8) -> None:
    """The guess, and the model's own answer for the published cluster."""
    days = published_days(gpus)
    many, stated = NARAYANAN
    config = cost.Config(
        params=GPT_3, tokens=GPT_3_TOKENS, batch=1536, offers=(f"A100 80GB SXM:{many}",), **GPT_3_SHAPE
    )
    found = cost.bill(config, config.parsed()[0])
    inside = found.days.low <= stated <= found.days.high
    say(
        f"{guess.against(days / 365.25, 'published')} Gradient accumulation, which the article adds, changes neither "
        f"number. For {many:,} A100 the course's model says {found.days} days; the paper's own estimate is {stated:g}: "
        f"{'inside' if inside else 'outside'} the band. The model takes {found.plan}, and "
        f"{' '.join(cost.arithmetic(config)).split('taken to reach ')[1]} The paper "
        f"reached {NARAYANAN_TFLOPS} TFLOP/s, {NARAYANAN_TFLOPS / hardware.spec('A100 80GB SXM').tflops('fp16'):.0%}."
    )


# -- offers and limits


def bills(config: cost.Config) -> pandas.DataFrame:
    """A row for each offer."""
    return cost.table(cost.bills(config), config.parsed())


def offers_figure(config: cost.Config, guess: Prediction) -> None:
    """Money against days, each offer with its band, and the limits."""
    found = [b for b in cost.bills(config) if b]
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
        "Lines are the band of the model; an offer whose dot is hollow does not keep the limits at its upper end. "
        f"{config.error}"
    ]
    if kept:
        said.append(f"{kept.offer} takes {kept.days} days and {kept.money}; {_share(kept)}")
        said.append(guess.against(kept.money.value, "modelled"))
        said.append(_undecided(found, kept, config))
    said.append(" ".join(cost.arithmetic(config)))
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
    return replace(b, seconds=cost.Range(b.seconds.value, b.seconds.value, b.seconds.value))


def _share(b: cost.Bill) -> str:
    running = b.training.total_s
    return (
        f"start-up is {b.training.startup_s / running:.1%} of it, checkpoints and failures "
        f"{b.training.lost_share:.1%} of the rest, the largest part of a step is {b.step.limit()}."
    )


def _records(found: list[cost.Bill]) -> Records:
    return Records(Record("cost", "days", "days", (b.days.value,), "modelled", {"offer": str(b.offer)}) for b in found)


def largest_table(config: cost.Config) -> pandas.DataFrame:
    """The largest model that each offer trains within the limits, and what stops it."""
    rows = []
    for offer in config.parsed():
        found = cost.largest_model(config, offer)
        if found is None:
            rows.append({"offer": str(offer), "parameters": "none"})
            continue
        params, b = found
        rows.append(
            {
                "offer": str(offer),
                "parameters": f"{params / 1e9:.2g} B",
                "tokens": f"{20 * params / 1e9:,.0f} B",
                "days (band)": str(b.days),
                "money": str(b.money),
                "limited by": _limited(config, offer, params),
            }
        )
    return pandas.DataFrame(rows).set_index("offer").fillna("")


def _limited(config: cost.Config, offer: cost.Offer, params: float) -> str:
    b = cost.bill(replace(config, params=1.03 * params, tokens=0.0), offer)
    if b is None:
        return "memory"
    return "deadline" if not cost.within(b, config.deadline_days) else "budget"


def energy_text(config: cost.Config) -> None:
    """Energy of the cheapest offer, and what kind of number it is."""
    found = [b for b in cost.bills(config) if b]
    kept = cost.cheapest(found, config.deadline_days, config.budget) or min(found, key=lambda b: b.gpu_hours.value)
    say(
        f"{kept.offer}: {kept.energy_kwh.times(1e-3)} MWh, modelled: {kept.power_w:g} W for every GPU-hour, which is "
        f"the datasheet's limit of a board times {config.power_factor:g}. A board that waits draws less; hosts, "
        "network and cooling come on top and are in it only if `power_factor` says how much. No energy was recorded "
        "for this course yet: on GPUs every lab's command prints the joules that NVML counted, and there is no record "
        "of it here.",
        folded="How much energy is that?",
    )
