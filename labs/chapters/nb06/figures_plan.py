"""Figure and text of notebook 06 about choosing a scheme, by the cost model of labs.common.cost_model."""

from __future__ import annotations

from labs.common.cost_model import choose
from labs.kit.display import say
from labs.kit.plot import GREY, SERIES, choice_map, figure, show
from labs.strategy import Config, advise, answer

CARDS = ("L4", "A100 80GB SXM", "H100 SXM")
SIZES = (1e8, 3e8, 1e9, 2e9, 3e9, 1e10, 3e10)
BATCHES = (4, 16, 64, 256)
COLORS = {
    "one GPU": "#E3E3E3",
    "DDP": SERIES[0],
    "FSDP2": SERIES[5],
    "pipeline": SERIES[4],
    "tensor": SERIES[2],
    "two of them": SERIES[3],
    "nothing fits": GREY,
}


def decision_map(config: Config) -> None:
    """Figure: the scheme to choose, by model size and batch, for real cards with their own links."""
    found = choose.grid(SIZES, CARDS, config.gpus, BATCHES, config.seq, config.network_gb_s)
    found["name"] = ["two of them" if " x " in s else s for s in found["scheme"]]
    wide = found.pivot(index="parameters", columns=["card", "batch"], values="name")
    wide = wide[[(c, b) for c in CARDS for b in BATCHES]]
    colors = {name: color for name, color in COLORS.items() if name in set(found["name"])}
    message = f"{config.gpus} GPUs: memory decides first, then the link"
    fig, ax = figure(message, xlabel="sequences per step", ylabel="parameters", size=(7.2, 4.6), legend_below=True)
    rows = [f"{p:.0e}".replace("e+0", "e").replace("e+", "e") for p in SIZES]
    choice_map(ax, wide.values.tolist(), columns=BATCHES * len(CARDS), rows=rows, colors=colors)
    ax.invert_yaxis()
    for k, card in enumerate(CARDS):
        ax.annotate(card, (k * len(BATCHES) - 0.4, len(SIZES) - 0.4), fontsize=10, va="bottom", annotation_clip=False)
        ax.axvline(k * len(BATCHES) - 0.5, color="black", linewidth=3 if k else 0)
    ax.title.set_position((0, 1.1))
    counts = "; ".join(f"{name} in {n} cells" for name, n in found["name"].value_counts().items())
    show(fig, alt=f"{message}. {counts}. Cards: {', '.join(CARDS)}.")


def reasons(config: Config) -> None:
    """In words: what the cost model says to use, and how long a step takes."""
    say(" ".join(answer(advise(config))) + " All of this is modelled.")
