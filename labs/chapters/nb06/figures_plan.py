"""Figures and tables of notebook 06 about choosing a scheme: the cost model of labs.parts.planning.parallel_cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas

from labs.kit.display import say
from labs.kit.plot import GREY, SERIES, choice_map, figure, show
from labs.parts.planning import blind_test, calibration
from labs.parts.planning.parallel_cost import NEAR, Plan
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


def calibration_table() -> pandas.DataFrame:
    """Published runs against the cost model: what calibrated, what the GPU reaches, errors of the others."""
    rows = []
    for t in calibration.tables():
        ratios = t.ratios()
        shown = ratios if len(ratios) <= 4 else {n: ratios[n] for n in _ends(ratios)}
        rows.append(
            {
                "table": t.name,
                "calibrated on": t.runs[0].name,
                "GPU reaches": f"{t.flop_s / 1e12:.0f} TFLOP/s ({t.flop_s / t.peak_flop_s:.0%})",
                "rows": len(ratios),
                "published over modelled time": "; ".join(f"{n} {r:.2f}" for n, r in shown.items()),
            }
        )
    return pandas.DataFrame(rows).set_index("table")


def _ends(ratios: dict[str, float]) -> list[str]:
    """The rows with the least, the middle and the largest ratio."""
    ordered = sorted(ratios, key=lambda name: ratios[name])
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


def error_band() -> None:
    """In words: the band, what is left of it between rows of one model, and what was chosen after looking."""
    band, same = calibration.band(), list(calibration.same_model())
    near = sum(abs(r - 1) < NEAR for r in same)
    said = [
        f"{band.rows} published runs that calibrated nothing took {band} times the seconds of these closed forms.",
        f"The tool's seconds are those of notebook 08's model, which knows two levels of links, and waiting ranks. "
        f"{blind_test.band_across()} The tool gives this range with every speed. With FLOP/s that you give, from a "
        f"step that you have timed, it gives that of the easier test: {blind_test.band()}",
        f"If each model's own row with the fewest GPUs calibrates, its other {len(same)} rows took "
        f"{min(same):.2f} to {max(same):.2f} times as long; {near} of them lie within {NEAR:.0%}.",
        f"The tool calls plans equal that differ by less than {NEAR:.0%}. That is a choice, made after these "
        "errors had been seen: beyond it, too, the order can be wrong.",
    ]
    for t in (t for t in calibration.tables() if t.looked):
        other = t.with_other_link()
        ratios = "; ".join(f"{name} {ratio:.2f}" for name, ratio in other.ratios().items())
        wider = calibration.band_of(other if x is t else x for x in calibration.tables())
        same_band = "the band would be the same" if str(wider) == str(band) else f"the band would be {wider}"
        said.append(
            f"{t.name}: {t.looked}. With those, {ratios}: {same_band}. Its {len(t.ratios())} rows are no test "
            "of the model."
        )
    say("\n".join(f"* {line}" for line in said))


def sources() -> None:
    """The published tables."""
    say("\n".join(f"* {t.name}: {t.source}" for t in calibration.tables()))


def place_of(config: Config) -> tuple[float, float]:
    """Column and row of the map at which `config` lies: the nearest link, between batches and sizes."""
    links = list(LINKS.values())
    link = min(range(len(links)), key=lambda k: abs(math.log(links[k] / config.of_machine()["link_gb_s"][0])))
    column = _between(config.batch, BATCHES)
    return link * len(BATCHES) + column, _between(config.params, SIZES)


def _between(value: float, steps: tuple[float, ...]) -> float:
    """Place of `value` on a logarithmic axis whose ticks are `steps`, at the edge if it lies outside."""
    return float(np.interp(math.log(value), [math.log(s) for s in steps], range(len(steps))))
