"""Figures and sentences of notebook 03 on scaling: strong and weak, Amdahl's fit, crossover, break-even."""

from __future__ import annotations

import math

import pandas

from labs import crossover, data_parallel
from labs.chapters.nb03.figures import ranks_of
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import estimate
from labs.kit.plot import SERIES, curve, figure, heat_map, ideal, points, prediction, show
from labs.kit.record import Records
from labs.parts.data_parallel import scaling
from labs.parts.sources.published import rtx_4090_epochs


def table_fit() -> pandas.DataFrame:
    """The article's 1-4 GPU table with what follows from it: speed-up, efficiency, cost, Amdahl's fit."""
    published = rtx_4090_epochs()
    seconds = {r.case["ranks"]: r.value for r in published}
    fit = scaling.fit_amdahl(list(seconds), list(seconds.values()))
    rows = [
        {"GPUs": n, "published s/epoch": t, "speed-up": round(seconds[1] / t, 3),
         "efficiency %": round(100 * seconds[1] / t / n, 1), "GPU-seconds/epoch": round(n * t, 1),
         "Amdahl's fit s": round(fit.time(n), 2)}
        for n, t in seconds.items()
    ]  # fmt: skip
    return pandas.DataFrame(rows).set_index("GPUs")


def scaling_figure(strong: Records, weak: Records, guess: Prediction) -> None:
    """Figure: speed-up against devices, here and in the article, with Amdahl's fit of the latter."""
    published, n = rtx_4090_epochs(), ranks_of(strong)
    counts = [r.case["ranks"] for r in published]
    times = [r.value for r in published]
    fit = scaling.fit_amdahl(counts, times)
    top = max(4, n)
    one_batch, batch_each = (data_parallel.speedups(run)["ddp", n] for run in (strong, weak))
    message = (
        f"{n} ranks: {one_batch.value:.2f} x when they share one batch, {batch_each.value:.2f} x with a batch each"
    )
    fig, ax = figure(message, xlabel="devices", ylabel="speed-up (x)", records=strong + weak + published)
    ideal(ax, range(1, top + 1))
    for run, label, aside in ((weak, "weak scaling", -0.06), (strong, "strong scaling", 0.06)):
        found = data_parallel.speedups(run)
        ddp = [found["single", 1]] + [v for (mode, k), v in found.items() if mode == "ddp" and k > 1]
        points(ax, [k + 1 + aside for k in range(len(ddp))], ddp, label=f"DDP here, {label}")
    points(ax, counts, [times[0] / t for t in times], kind="published", label="article, RTX 4090")
    many = [1 + i / 10 for i in range(10 * (top - 1) + 1)]
    curve(
        ax, many, [fit.speedup(k) for k in many], label=f"Amdahl's fit of it, limit {fit.limit:.1f} x", color=SERIES[2]
    )
    prediction(ax, n, guess)
    ax.set_xticks(range(1, top + 1))
    show(fig, alt=f"{message}. The article's four cards: {times[0] / times[-1]:.2f} x. Ideal: {top} x on {top}.")
    say(
        f"Strong scaling on {n} ranks: {one_batch}; weak scaling: {batch_each}. {guess.against(one_batch)} Amdahl's fit"
        f" of the article: {fit.serial:.2f} s that do not shrink and {fit.parallel:.2f} s that do."
    )


def crossover_figures(run: Records, guess: Prediction) -> None:
    """Two maps of the speed-up over width and batch: what the model says, what was measured; the guess counts wins."""
    rows = crossover.crossover_map(run)
    widths, batches = sorted({r["width"] for r in rows}), sorted({r["batch"] for r in rows})
    n = ranks_of(run)
    span = max(abs(v - 1) for r in rows for v in (r["modelled"], r["measured"].value))
    for kind, take in (("modelled", lambda r: r["modelled"]), ("measured", lambda r: r["measured"].value)):
        cells = {(r["width"], r["batch"]): take(r) for r in rows}
        grid = [[cells[w, b] for b in batches] for w in widths]
        wins = sum(v > 1 for v in cells.values())
        verb = "should win" if kind == "modelled" else "won"
        message = f"DDP on {n} ranks {verb} in {wins} of {len(cells)} cells"
        fig, ax = figure(message, xlabel="samples per rank", ylabel="layer width", records=run, size=(6.2, 2.8))
        heat_map(ax, grid, columns=batches, rows=widths, kind=kind, center=1.0, span=span, label="speed-up (x)")
        show(fig, alt=f"{message}: from {min(cells.values()):.2f} to {max(cells.values()):.2f} times as fast.")
    say(_crossover_text(rows, guess))


def _crossover_text(rows: list[dict], guess: Prediction) -> str:
    wins = sum(r["measured"].value > 1 for r in rows)
    right = sum((r["modelled"] > 1) == (r["measured"].value > 1) for r in rows)
    worst, best = (f(rows, key=lambda r: r["measured"].value) for f in (min, max))
    ratio = estimate([r["measured"].value / r["modelled"] for r in rows], "x")
    return (
        f"DDP won in {wins} of {len(rows)} cells. {guess.against(float(wins))} The model names the winner in {right} "
        f"of {len(rows)}; always naming the commoner one would name {max(wins, len(rows) - wins)}. "
        f"Measured over modelled: {ratio}. It knows one rank's step and the link, not what DDP itself "
        "costs per step, nor what ranks take from each other. Worst:"
        f" width {worst['width']}, batch {worst['batch']}, {worst['measured']}; best: width {best['width']}, batch"
        f" {best['batch']}, {best['measured']}."
    )


def break_even_text(run: Records, images: int = 60_000) -> None:
    """After how many epochs of `images` images DDP has earned back its start-up, from this run."""
    n = ranks_of(run)
    phases = {r.case["phase"]: r.value for r in run.where("startup_s")}
    single, ddp = run.one("step_s", mode="single"), run.one("step_s", mode="ddp", ranks=n)
    epoch_1 = images / single.case["batch_per_rank"] * single.value
    epoch_n = images / (n * ddp.case["batch_per_rank"]) * ddp.value
    epochs = scaling.break_even_epochs(sum(phases.values()), epoch_1, epoch_n)
    listed = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in phases.items())
    end = f"DDP has earned it back after {epochs:.2f} epochs" if math.isfinite(epochs) else "it is never earned back"
    say(f"Start-up: {listed}. An epoch of {images:,} images takes {epoch_1:.1f} s on one rank and {epoch_n:.1f} s on"
        f" {n}: {end}. A torchrun from cold pays a few seconds more, for `import torch` in every rank.")  # fmt: skip
