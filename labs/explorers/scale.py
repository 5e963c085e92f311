"""What do more machines cost in efficiency? Card, model, batch, nodes and network with knobs, by the cost model."""

from __future__ import annotations

from matplotlib.figure import Figure

from labs import scaling_model
from labs.common.cost_model import cards, published, seconds
from labs.explorers.controls import Menu, Slider, explore, here, log_axis, powers
from labs.kit.plot import GREY, SERIES, figure, legend_below
from labs.kit.record import Record, Records

CARDS = tuple(name for name in cards.known() if published.reached(name)[1])
NODES = powers(1, 1024)
PER_NODE = 8


def config_of(card: str, billions: float, sequences: float, nodes: float, network_gb_s: float) -> scaling_model.Config:
    """What the knobs mean; `sequences` is per GPU, so the batch grows with the nodes."""
    gpus = int(PER_NODE * nodes)
    return scaling_model.Config(
        params=1e9 * billions, batch=int(sequences * gpus), gpu=card, gpus=gpus, network_gb_s=network_gb_s
    )


def share(config: scaling_model.Config) -> float:
    """Percent of a lone GPU's work that each GPU does."""
    return 100 * seconds.efficiency(config.work(), config.cluster(), config.plan())


def draw(card: str, billions: float, sequences: float, nodes: float, network_gb_s: float) -> tuple[Figure, str, str]:
    """The figure, what it shows in words, and the sentence under it."""
    config = config_of(card, billions, sequences, nodes, network_gb_s)
    now = share(config)
    message = f"{config.gpus:,} GPUs work at {now:.0f}% of one, by the model"
    records = Records([Record("scaling_model", "efficiency", "%", (now,), "modelled")])
    fig, ax = figure(message, xlabel="nodes of 8 GPUs", ylabel="efficiency (%)", records=records)
    for gb_s, color in ((network_gb_s, SERIES[0]), (network_gb_s / 4, SERIES[1])):
        shares = [share(config_of(card, billions, sequences, n, gb_s)) for n in NODES]
        ax.plot(NODES, shares, "--", label=f"{gb_s:.3g} GB/s per GPU", color=color)
    ax.plot([NODES[0], NODES[-1]], [100, 100], "--", color=GREY, label="ideal")
    here(ax, nodes, now)
    log_axis(ax, NODES[::2])
    ax.set_ylim(0, 110)
    legend_below(fig, ax)
    found = scaling_model.predict(config)
    time = found.seconds
    told = f"A step takes {time} s." if time else f"N{found.refusal[1:]}"
    return fig, f"Efficiency against nodes. {message}.", f"{told} Its largest part is {found.step.limit()}."


def scale() -> None:
    """Explore efficiency against nodes with FSDP2."""
    explore(
        draw,
        card=Menu("card", CARDS, "H100 SXM"),
        billions=Slider("parameters (10⁹)", (1, 3, 7, 13, 30, 70), 7),
        sequences=Slider("sequences of 2,048 tokens per GPU", powers(1, 64), 8),
        nodes=Slider("nodes of 8 GPUs", NODES, 8),
        network_gb_s=Slider("network per GPU (GB/s)", (0.125, 0.5, 1.25, 3.125, 6.25, 12.5, 25, 50), 25),
    )
