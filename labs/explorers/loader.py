"""Does the loader or the model limit training, and how many workers are enough on a machine with several ranks?"""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from labs.common.loading.feed import expected
from labs.explorers.controls import Slider, explore, here, powers
from labs.kit import plot
from labs.kit.record import Record

MOST = 16  # workers of each rank


def loader_rate(one_rate: float, workers: int, cores: float, wait_percent: float) -> float:
    """Return images/s of `workers` on `cores`, if one worker gives `one_rate` and waits for `wait_percent` of its time.

    Waiting takes no core. Without workers, the trainer loads.
    """
    busy = 1 - wait_percent / 100
    return one_rate * min(max(1, workers), cores / busy if busy else math.inf)


def draw(model: float, one: float, workers: int, cores: int, ranks: int, wait: int) -> tuple[Figure, str, str]:
    """Return a figure of a rank's images/s against its workers, its description, and what limits."""
    counts, own_cores = range(MOST + 1), cores / ranks
    loader = [loader_rate(one, w, own_cores, wait) for w in counts]
    both = [expected(model, rate, w) for w, rate in zip(counts, loader, strict=True)]
    enough = next((w for w in counts if both[w] >= 0.999 * model), None)
    rate = both[workers]
    who = "the model" if rate >= 0.999 * model else "the loader" if workers else "taking turns"
    message = f"{workers} worker{'s' * (workers != 1)}: {rate:,.0f} images/s for a rank, limited by {who}"
    origin = Record("loader", "images_per_s", "1/s", (rate,), "modelled")
    fig, ax = plot.figure(message, xlabel="num_workers of each rank", ylabel="images/s", records=[origin])
    ax.axhline(model, color=plot.GREY, linestyle="--")
    ax.plot(counts, loader, color=plot.VERMILION, linestyle=":")
    ax.plot(counts, both, color=plot.BLUE)
    ax.text(MOST, model, "model alone", va="bottom", ha="right", color=plot.GREY)
    ax.text(MOST, loader[-1], "loader alone", va="bottom", ha="right", color=plot.VERMILION)
    ax.text(MOST, both[-1], "both", va="top", ha="right", color=plot.BLUE)
    here(ax, workers, rate)
    ax.legend()
    ax.set(xlim=(-0.5, MOST + 0.5), ylim=(0, 1.15 * max(model, loader[-1])), xticks=range(0, MOST + 1, 2))
    total = f"{ranks} x {workers} = {ranks * workers} workers on {cores} cores."
    if enough is None:
        return fig, f"{message}.", f"{total} No number of workers feeds the model: each rank has {own_cores:g} cores."
    return fig, f"{message}.", f"{total} {enough} for each rank are enough."


def loader() -> None:
    """Explore rates, workers, cores, ranks and the share of its time that a worker waits for a disk or network."""
    explore(
        lambda model, one, workers, cores, ranks, wait: draw(model, one, int(workers), int(cores), int(ranks), wait),
        model=Slider("a rank's model takes (images/s)", powers(64, 8192), 2048),
        one=Slider("one worker gives (images/s)", powers(64, 8192), 256),
        workers=Slider("num_workers of each rank", range(MOST + 1), 8),
        cores=Slider("CPU cores of the machine", (2, 4, 8, 16, 32, 64, 128), 32),
        ranks=Slider("ranks (GPUs)", (1, 2, 4, 8), 8),
        wait=Slider("a worker waits (% of its time)", (0, 25, 50, 75, 90, 99), 0),
    )
