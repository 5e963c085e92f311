"""Which split fits a model of a given size on real cards: bytes per GPU of each scheme, by the cost model."""

from __future__ import annotations

import pandas
from matplotlib.figure import Figure

from labs.common.cost_model import cards
from labs.explorers.controls import Menu, Slider, explore
from labs.kit import plot
from labs.kit.record import Record
from labs.strategy import Config, advise

SCHEMES = ["one GPU", "DDP", "FSDP2", "pipeline", "tensor"]
"""The schemes drawn, from top to bottom. If the model chooses a mix of them, it is drawn below."""


def rows(table: pandas.DataFrame, chosen: str | None) -> pandas.DataFrame:
    """Return the plans to draw: those of SCHEMES possible with this many GPUs, and the chosen one."""
    names = [s for s in SCHEMES if s in set(table["scheme"])]
    return table.set_index("scheme").loc[[*names, *([chosen] if chosen and chosen not in names else [])]]


def draw(params: float, batch: int, gpus: int, card: str, seq: int) -> tuple[Figure, str, str]:
    """Return the figure, its description, and the sentence below it."""
    config = Config(params=params, batch=batch, gpus=gpus, gpu=card, seq=seq)
    advice = advise(config)
    chosen = advice.choice.plan.scheme if advice.choice else None
    shown = rows(advice.table, chosen)
    limit = shown["limit_gb"].iloc[0]
    message = f"{params / 1e9:g} billion parameters, {gpus} x {card}: {chosen or 'nothing fits'}"
    origin = Record("strategy", "memory_bytes", "B", (1e9 * limit,), "modelled")
    fig, ax = plot.figure(message, xlabel="GB on the fullest GPU", ylabel="plan", records=[origin])
    ax.barh(shown.index, shown["states_gb"], color=plot.BLUE, label="states")
    ax.barh(
        shown.index,
        shown["activations_gb"],
        left=shown["states_gb"],
        color=plot.ORANGE,
        label="activations",
    )
    ax.axvline(limit, color=plot.GREY, linestyle=":", label="90% of the card")
    ax.set(xlim=(0, 2.5 * limit), ylim=(len(shown) - 0.5, -0.5))
    plot.legend_below(fig, ax)
    if not advice.choice:
        enough = f"{advice.enough_gpus:,} such GPUs are enough." if advice.enough_gpus else ""
        return fig, f"{message}.", f"No plan keeps 10% of the memory free with Adam in FP32. {enough}".strip()
    time = advice.estimate.seconds
    told = (
        f" {time.value:.2g} s per step ({time.low:.2g} to {time.high:.2g})." if time else f" {advice.estimate.refusal}"
    )
    used = advice.choice.memory_bytes / 1e9
    return fig, f"{message}.", f"Fastest that fits: {advice.choice.plan}, {used:.0f} of {limit:.0f} GB.{told}"


def split() -> None:
    """Explore the model's size, batch and sequence length, and the number and type of GPUs."""
    explore(
        lambda params, batch, gpus, card, seq: draw(float(params), int(batch), int(gpus), card, int(seq)),
        params=Slider("parameters", (1e8, 3e8, 1e9, 3e9, 7e9, 1.3e10, 3e10, 7e10), 7e9),
        batch=Slider("sequences per step, all GPUs", (8, 16, 32, 64, 128, 256), 64),
        gpus=Slider("GPUs", (1, 2, 4, 8, 16, 64), 8),
        card=Menu("card", cards.known(), "A100 80GB SXM"),
        seq=Slider("tokens per sequence", (512, 1024, 2048, 4096, 8192), 2048),
    )
