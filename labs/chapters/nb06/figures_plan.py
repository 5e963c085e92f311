"""Figures and tables of notebook 06 about choosing a scheme: the cost model of labs.common.planning.parallel_cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from labs.common.planning.parallel_cost import Plan
from labs.kit.display import say
from labs.kit.plot import GREY, SERIES, choice_map, figure, show
from labs.strategy import Config, advise

LINKS = {"10 Gbit Ethernet": 1.0, "PCIe 4.0 x16": 25.0, "NVLink 4": 400.0}  # GB/s in one direction: our round numbers
SIZES = (1e8, 3e8, 1e9, 2e9, 3e9, 1e10, 3e10)
BATCHES = (4, 16, 64, 256)
COLORS = {
    "one GPU": "#E3E3E3",
    "DDP": SERIES[0],
    "FSDP2": SERIES[5],
    "pipeline": SERIES[4],
    "tensor": SERIES[2],
    "two of them": SERIES[3],
    "8-bit Adam": "#F3D9C9",
    "BF16 states": "#E8B89A",
    "offload": SERIES[1],
    "LoRA": "#8C6D5A",
    "nothing": GREY,
}
SHORT = {
    "8-bit Adam": "8-bit Adam",
    "weights, gradients and moments in BF16": "BF16 states",
    "FSDP2 with CPU offload": "offload",
    "LoRA of rank 16 on BF16 weights": "LoRA",
    "LoRA of rank 16 on 4-bit weights": "LoRA",
}


def family(plan: Plan | None) -> str:
    """The colour's name of a plan."""
    if plan is None:
        return "nothing"
    scheme = plan.scheme.replace("naive split", "pipeline")
    return "two of them" if " x " in scheme else scheme


def cell(config: Config) -> str:
    """What the map says of one job: a scheme, or what fits where none does."""
    advice = advise(config)
    if advice.choice or not advice.others:
        return family(advice.choice and advice.choice.plan)
    return SHORT[advice.others[0][0].name]


def decision_map(config: Config) -> None:
    """Figure: the scheme to choose, by model size and batch, for three links; a star where `config` is.

    Where none fits with Adam in FP32: the first of the ways out that does, whose time the model does not know.
    """
    names = [
        [
            cell(replace(config, params=p, batch=b, link_gb_s=gb_s, layers=0, hidden=0))
            for gb_s in LINKS.values()
            for b in BATCHES
        ]
        for p in SIZES
    ]
    colors = {name: color for name, color in COLORS.items() if any(name in row for row in names)}
    memory = config.of_machine()["memory_gb"][0]
    by_link = [row[k :: len(BATCHES)] for row in names for k in range(len(BATCHES))]
    turned = sum(len(set(cells)) > 1 for cells in by_link)
    message = f"{config.gpus} GPUs of {memory:g} GB: the link decides in {turned} of {len(by_link)} cases"
    fig, ax = figure(message, xlabel="sequences per step", ylabel="parameters", size=(7.2, 4.6), legend_below=True)
    rows = [f"{p:.0e}".replace("e+", "e").replace("e0", "e") for p in SIZES]
    choice_map(ax, names, columns=BATCHES * len(LINKS), rows=rows, colors=colors)
    ax.invert_yaxis()
    for k, (link, gb_s) in enumerate(LINKS.items()):
        ax.annotate(
            f"{link}\n{gb_s:g} GB/s",
            (k * len(BATCHES) - 0.4, len(SIZES) - 0.4),
            fontsize=10,
            va="bottom",
            annotation_clip=False,
        )
        ax.axvline(k * len(BATCHES) - 0.5, color="black", linewidth=3 if k else 0)
    ax.title.set_position((0, 1.16))
    x, y = place_of(config)
    ax.plot([x], [y], marker="*", markersize=18, color="white", markeredgecolor="black", linestyle="", label="yours")
    cells = [name for row in names for name in row]
    alt = "; ".join(f"{name} in {cells.count(name)} of {len(cells)} cells" for name in colors)
    show(fig, alt=f"{message}. {alt}. Links: {', '.join(LINKS)}.")


def reasons(config: Config) -> None:
    """In words: what the cost model says to use, and why."""
    say(" ".join(advise(config).reasons()) + " All of this is modelled.")


def place_of(config: Config) -> tuple[float, float]:
    """Column and row of the map at which `config` lies: the nearest link, between batches and sizes."""
    links = list(LINKS.values())
    link = min(range(len(links)), key=lambda k: abs(math.log(links[k] / config.of_machine()["link_gb_s"][0])))
    column = _between(config.batch, BATCHES)
    return link * len(BATCHES) + column, _between(config.params, SIZES)


def _between(value: float, steps: tuple[float, ...]) -> float:
    """Place of `value` on a logarithmic axis whose ticks are `steps`, at the edge if it lies outside."""
    return float(np.interp(math.log(value), [math.log(s) for s in steps], range(len(steps))))
