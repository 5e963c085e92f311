"""Scaling with knobs in notebook 08: model, cards, nodes, links, a price give time, efficiency, cost, what limits."""

from __future__ import annotations

from labs import cost
from labs.common.planning import blind_test, scaling
from labs.common.planning.parallel_cost import Plan
from labs.common.planning.scaling import Cluster, Work
from labs.kit import hardware
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, ideal, log_axes
from labs.kit.record import Record, Records

CARDS = tuple(s.gpu for s in hardware.specs() if s.link_gb_s and (s.tflops("bf16") or s.tflops("fp16")))
NODES = powers(1, 1024)
PRICES = (0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12)


def setting(
    card: str, billions: float, sequences: float, per_node: float, nodes: float, network_gb_s: float, way: str
) -> tuple[Work, Cluster, Plan, float]:
    """What the knobs mean, and the steps of a training; `sequences` is per GPU: the batch grows with the nodes."""
    gpus = int(per_node * nodes)
    config = cost.Config(
        params=1e9 * billions, batch=int(sequences * gpus), gpus_per_node=int(per_node), network_gb_s=network_gb_s
    )
    cluster = cost.cluster_of(config, cost.Offer(card, gpus))
    return Work.of(config.job()), cluster, Plan(data=gpus, sharded=way == "FSDP2" and gpus > 1), config.steps


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
        return 100 * scaling.efficiency(*setting(card, billions, sequences, per_node, count, gb_s, way)[:3])

    work, cluster, plan, steps = setting(card, billions, sequences, per_node, nodes, network_gb_s, way)
    now = share(nodes, network_gb_s)
    message = f"{cluster.gpus:,} GPUs work at {blind_test.band().efficiency(now / 100)} of one"
    records = Records([Record("scaling_model", "efficiency", "%", (now,), "modelled")])
    fig, ax = figure(message, xlabel="nodes", ylabel="efficiency (%)", records=records, legend_below=True)
    for gb_s, color in ((network_gb_s, SERIES[0]), (network_gb_s / 4, SERIES[1])):
        curve(ax, NODES, [share(n, gb_s) for n in NODES], label=f"network of {gb_s:.3g} GB/s", color=color)
    ideal(ax, [NODES[0], NODES[-1]], [100, 100])
    here(ax, nodes, now)
    log_axes(ax, NODES[::2])
    ax.set_ylim(0, 110)
    sentence = " ".join(
        (
            limits(scaling.step(work, cluster, plan)),
            bill(work, cluster, plan, steps, price),
            "Ranges hold eight in ten published runs. Memory is not looked at here: labs.strategy says what fits.",
        )
    )
    return fig, f"Efficiency against nodes. {message}, on {nodes:g} nodes of {per_node:g} {card}.", sentence


def limits(step: scaling.Step) -> str:
    """Seconds of a step, what takes most of it, and what takes most beside arithmetic."""
    lost = {name: s for name, s in step.parts().items() if name != "arithmetic"}
    worst = max(lost, key=lambda name: lost[name])
    tail = f" ({level(step.between_s > step.inside_s)})" if worst == "exposed communication" else ""
    return (
        f"A step takes {blind_test.band_across().seconds(step.step_s)}. The largest part of it is {step.limit()}; "
        f"besides arithmetic the largest is {worst}{tail}: {100 * lost[worst] / step.step_s:.2g} %."
    )


def bill(work: Work, cluster: Cluster, plan: Plan, steps: float, price: float) -> str:
    """Days, GPU-hours and money of 20 tokens for each parameter, with start-up, checkpoints and failures."""
    seconds = cost.with_band(scaling.training(work, cluster, steps, plan), blind_test.band_across())
    hours = seconds.times(cluster.gpus / cost.HOUR_S)
    return (
        f"Trained on {cost.TOKENS_PER_PARAMETER} tokens for each parameter: {seconds.times(1 / cost.DAY_S)} days, "
        f"{hours} GPU-hours; at {price:g} for each, {hours.times(price)}."
    )


def level(between: bool) -> str:
    """The level of links that communication waits for."""
    return "between nodes" if between else "inside a node"
