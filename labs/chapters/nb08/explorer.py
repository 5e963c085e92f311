"""Scaling with knobs in notebook 08: model, cards, nodes and links give a step's time, efficiency, what limits it."""

from __future__ import annotations

from labs.kit import hardware
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, ideal, log_axes
from labs.kit.record import Record, Records
from labs.parts.planning import blind_test, scaling
from labs.parts.planning.parallel_cost import Job, Plan, shape
from labs.parts.planning.scaling import Cluster, Work

CARDS = tuple(s.gpu for s in hardware.specs() if s.link_gb_s and (s.tflops("bf16") or s.tflops("fp16")))
NODES = powers(1, 1024)
SEQ = 2048
REACHED = 0.4  # of the dense peak: between the 36 and 68 % that notebook 06's published runs reach


def setting(card: str, billions: float, sequences: float, per_node: float, nodes: float, network_gb_s: float,
            way: str) -> tuple[Work, Cluster, Plan]:  # fmt: skip
    """What the knobs mean; `sequences` is per GPU, so that the batch grows with the nodes."""
    gpus = int(per_node * nodes)
    layers, hidden = shape(1e9 * billions)
    work = Work.of(Job(1e9 * billions, sequences * gpus, SEQ, layers, hidden, 50257))
    cluster = scaling.of_card(card, gpus, int(per_node), network_gb_s, REACHED)
    return work, cluster, Plan(data=gpus, sharded=way == "FSDP2" and gpus > 1)


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
    )


def draw(card: str, billions: float, sequences: float, per_node: float, nodes: float, network_gb_s: float,
         way: str) -> tuple:  # fmt: skip
    """Efficiency of each GPU against nodes, for this network and one four times as slow; what limits this setting."""

    def share(count: float, gb_s: float) -> float:
        return 100 * scaling.efficiency(*setting(card, billions, sequences, per_node, count, gb_s, way))

    work, cluster, plan = setting(card, billions, sequences, per_node, nodes, network_gb_s, way)
    step, now, band = scaling.step(work, cluster, plan), share(nodes, network_gb_s), blind_test.band_across()
    message = f"{cluster.gpus:,} GPUs work at {blind_test.band().efficiency(now / 100)} of one"
    records = Records([Record("scaling_model", "efficiency", "%", (now,), "modelled")])
    fig, ax = figure(message, xlabel="nodes", ylabel="efficiency (%)", records=records,
                     legend_below=True)  # fmt: skip
    for gb_s, color in ((network_gb_s, SERIES[0]), (network_gb_s / 4, SERIES[1])):
        curve(ax, NODES, [share(n, gb_s) for n in NODES], label=f"network of {gb_s:.3g} GB/s", color=color)
    ideal(ax, [NODES[0], NODES[-1]], [100, 100])
    here(ax, nodes, now)
    log_axes(ax, NODES[::2])
    ax.set_ylim(0, 110)
    lost = {name: s for name, s in step.parts().items() if name != "arithmetic"}
    worst = max(lost, key=lambda name: lost[name])
    tail = f" ({level(step.between_s > step.inside_s)})" if worst == "exposed communication" else ""
    sentence = (
        f"A step takes {band.seconds(step.step_s)}; the ranges hold eight in ten published runs. Most of it is "
        f"{step.limit()}; besides arithmetic most goes into {worst}{tail}: {100 * lost[worst] / step.step_s:.2g} %. "
        "Memory is not looked at here: labs.strategy says what fits."
    )
    return fig, f"Efficiency against nodes. {message}, on {nodes:g} nodes of {per_node:g} {card}.", sentence


def level(between: bool) -> str:
    """The level of links that communication waits for."""
    return "between nodes" if between else "inside a node"
