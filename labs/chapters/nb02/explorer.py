"""Workers against model rate of notebook 02 with knobs: who limits, and how many workers are enough?"""

from __future__ import annotations

from labs import loader_traps
from labs.common.loading.feed import expected, expected_on_cores
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure
from labs.tune_dataloader.rules import CLOSE

MOST = 16  # workers
ITEMS = {"compute (decode JPEG)": "compute", "wait (disk, network)": "sleep"}
GPU, CORES = "a GPU of its own", "the cores of the workers"


def workers() -> None:
    """Explore model rate, loader rate, workers and cores."""
    explore(
        draw,
        model_rate=Slider("the model takes (images/s)", powers(50, 6400), 800),
        one_rate=Slider("one worker gives (images/s)", powers(50, 6400), 200),
        workers=Slider("num_workers", range(MOST + 1), 2),
        cores=Slider("CPU cores", (1, 2, 4, 6, 8, 16), 6),
        items=Menu("items mostly", list(ITEMS), "compute (decode JPEG)"),
        place=Menu("the model computes on", [GPU, CORES], GPU),
    )


def together(model_rate: float, one_rate: float, workers: int, cores: int, items: str, place: str) -> float:
    """Images per second of model and loader together. Items that wait take no core from the model."""
    loader = loader_traps.predict(ITEMS[items], workers, 1 / one_rate, cores)
    if place == CORES and ITEMS[items] == "compute":
        return expected_on_cores(model_rate, loader, one_rate, workers, cores)
    return expected(model_rate, loader, workers)


def draw(model_rate: float, one_rate: float, workers: int, cores: int, items: str, place: str) -> tuple:
    """Images per second against the number of workers: model alone, loader alone, both together."""
    counts = list(range(MOST + 1))
    both = [together(model_rate, one_rate, w, cores, items, place) for w in counts]
    loader = [loader_traps.predict(ITEMS[items], w, 1 / one_rate, cores) for w in counts]
    enough = next(w for w in counts if both[w] >= (1 - CLOSE) * max(both))
    rate, best = both[workers], max(both)
    who = limited_by(rate, model_rate, loader[workers], best, workers)
    message = f"{_count(workers)}: {rate:,.0f} images/s, limited by {who}"
    fig, ax = figure(message, xlabel="num_workers", ylabel="images/s", legend_below=True)
    curve(ax, counts, [model_rate] * len(counts), label="model alone")
    curve(ax, counts, loader, label="loader alone", color=SERIES[1])
    curve(ax, counts, both, label="together", color=SERIES[0])
    here(ax, workers, rate)
    ax.set_xticks(range(0, MOST + 1, 2))
    ax.set_xlim(-0.5, MOST + 0.5)
    ax.set_ylim(0, 1.75 * model_rate)  # the model's line keeps its height: what moves is the loader
    if best < (1 - CLOSE) * model_rate:
        rest = f"No number of workers feeds the model: {best:,.0f} of {model_rate:,.0f} images/s with {enough}."
    else:
        rest = f"{_count(enough)} {'is' if enough == 1 else 'are'} needed to feed the model."
    return fig, f"Images per second against num_workers, up to {MOST}. {message}.", f"Limited by {who}: {rest}"


def limited_by(rate: float, model_rate: float, loader_rate: float, best: float, workers: int) -> str:
    """What holds the pipeline back."""
    if rate >= (1 - CLOSE) * model_rate:
        return "the model"
    if not workers:
        return "taking turns: one process loads and trains"
    if rate < (1 - 1e-9) * loader_rate:
        return "the cores that model and workers share"
    return "the workers" if rate < (1 - 1e-9) * best else "the loader: more workers do not help"


def _count(workers: int) -> str:
    return "No worker" if workers == 0 else f"{workers} worker{'s' * (workers > 1)}"
