"""Scaling with knobs in notebook 08: model, cards, nodes, links, a price give time, efficiency, cost, what limits."""

from __future__ import annotations

from labs import cost
from labs.common.cost_model import cards, published, seconds
from labs.common.cost_model.jobs import Plan
from labs.common.cost_model.published import Range
from labs.common.cost_model.seconds import Cluster, Work
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, ideal, log_axes
from labs.kit.record import Record, Records

CARDS = tuple(name for name in cards.known() if published.reached(name)[1])
NODES = powers(1, 1024)
PRICES = (0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12)


def setting(
    card: str, billions: float, sequences: float, per_node: float, nodes: float, network_gb_s: float, way: str
) -> tuple[Work, Cluster, Plan, cost.Config]:
    """What the knobs mean; `sequences` is per GPU: the batch grows with the nodes."""
    gpus = int(per_node * nodes)
    config = cost.Config(
        params=1e9 * billions, batch=int(sequences * gpus), gpus_per_node=int(per_node), network_gb_s=network_gb_s
    )
    cluster = cost.cluster_of(config, cost.Offer(card, gpus))
    return Work.of(config.job), cluster, Plan(data=gpus, sharded=way == "FSDP2" and gpus > 1), config


def scale() -> None:
    """Explore efficiency against nodes."""
    explore(
        draw,
        card=Menu("card", CARDS, "A100 80GB SXM"),
        billions=Slider("parameters (10⁹)", (0.125, 0.35, 1, 3, 7, 13, 30, 70), 7),
        sequences=Slider("sequences of 2,048 tokens per GPU", powers(1, 64), 2),
        per_node=Slider("GPUs in a node", (1, 2, 4, 8, 16), 8),
        nodes=Slider("nodes", NODES, 8),
        network_gb_s=Slider(
            "network of one GPU, one direction (GB/s)", (0.125, 0.5, 1.25, 3.125, 6.25, 12.5, 25, 50), 6.25
        ),
        way=Menu("way", ("DDP", "FSDP2"), "FSDP2"),
        price=Slider("your price of one GPU for one hour", PRICES, 2),
    )


def draw(
    card: str,
    billions: float,
    sequences: float,
    per_node: float,
    nodes: float,
    network_gb_s: float,
    way: str,
    price: float,
) -> tuple:
    """Efficiency of each GPU against nodes, for this network and one four times as slow; time, cost, what limits."""

    def share(count: float, gb_s: float) -> float:
        return 100 * seconds.efficiency(*setting(card, billions, sequences, per_node, count, gb_s, way)[:3])

    work, cluster, plan, config = setting(card, billions, sequences, per_node, nodes, network_gb_s, way)
    now = share(nodes, network_gb_s)
    message = f"{cluster.gpus:,} GPUs work at {now:.0f}% of one, by the model"
    records = Records([Record("scaling_model", "efficiency", "%", (now,), "modelled")])
    fig, ax = figure(message, xlabel="nodes", ylabel="efficiency (%)", records=records, legend_below=True)
    for gb_s, color in ((network_gb_s, SERIES[0]), (network_gb_s / 4, SERIES[1])):
        curve(ax, NODES, [share(n, gb_s) for n in NODES], label=f"network of {gb_s:.3g} GB/s", color=color)
    ideal(ax, [NODES[0], NODES[-1]], [100, 100])
    here(ax, nodes, now)
    log_axes(ax, NODES[::2])
    ax.set_ylim(0, 110)
    found = published.estimate(work, cluster, plan, published.reached(card)[1])
    lost = {name: part for name, part in found.step.parts().items() if name != "arithmetic"}
    worst = max(lost, key=lost.get)
    sentence = (
        f"{found} The largest part of a step is {found.step.limit()}; besides arithmetic it is {worst}, "
        f"{100 * lost[worst] / found.step.step_s:.2g} %. {bill(config, cluster, found.seconds, price)}"
        "Memory is not looked at here: labs.strategy says what fits."
    )
    return fig, f"Efficiency against nodes. {message}, on {nodes:g} nodes of {per_node:g} {card}.", sentence


def bill(config: cost.Config, cluster: Cluster, step_s: Range | None, price: float) -> str:
    """Days, GPU-hours and money of 20 tokens for each parameter, with start-up, checkpoints and failures."""
    days = cost.days(config, step_s, cost.lost_share(config, cluster.gpus))
    if days is None:
        return ""
    hours = days.times(24 * cluster.gpus)
    return (
        f"Trained on {cost.TOKENS_PER_PARAMETER} tokens for each parameter: {days} days, {hours} GPU-hours; at "
        f"{price:g} for each, {hours.times(price)}. "
    )
