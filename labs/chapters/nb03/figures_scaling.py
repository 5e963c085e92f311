"""Figures and sentences of notebook 03 on scaling: strong and weak, Amdahl's fit, crossover."""

from __future__ import annotations

import pandas

from labs import crossover, data_parallel
from labs.chapters.nb03.figures import ranks_of
from labs.common.data_parallel import scaling
from labs.common.sources.published import rtx_4090_epochs
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, curve, figure, heat_map, ideal, points, prediction, show
from labs.kit.record import Records


def table_fit() -> pandas.DataFrame:
    """The article's 1-4 GPU table with what follows from it: speed-up, efficiency, cost, Amdahl's fit."""
    published = rtx_4090_epochs()
    seconds = {r.case["ranks"]: r.value for r in published}
    fit = scaling.fit_amdahl(list(seconds), list(seconds.values()))
    rows = [
        {
            "GPUs": n,
            "published s/epoch": t,
            "speed-up": round(seconds[1] / t, 3),
            "efficiency %": round(100 * seconds[1] / t / n, 1),
            "GPU-seconds/epoch": round(n * t, 1),
            "Amdahl's fit s": round(fit.time(n), 2),
        }
        for n, t in seconds.items()
    ]
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
        + ", not told apart" * (not _apart(one_batch, batch_each))
    )
    fig, ax = figure(message, xlabel="devices", ylabel="speed-up (x)", records=strong + weak + published)
    ideal(ax, range(1, top + 1))
    for run, label, aside in ((weak, "weak scaling", -0.06), (strong, "strong scaling", 0.06)):
        found = data_parallel.speedups(run)
        ddp = [found["single", 1]] + [v for (mode, k), v in found.items() if mode == "ddp" and k > 1]
        color = SERIES[0] if run is weak else SERIES[1]
        points(ax, [k + 1 + aside for k in range(len(ddp))], ddp, label=f"DDP here, {label}", color=color)
        pale = SERIES[5] if run is weak else SERIES[4]
        points(ax, [n + 3 * aside], [found["copies", n]], label=f"copies, {label}", color=pale)
    points(ax, counts, [times[0] / t for t in times], kind="published", label="article, RTX 4090")
    many = [1 + i / 10 for i in range(10 * (top - 1) + 1)]
    curve(
        ax,
        many,
        [fit.speedup(k) for k in many],
        label=f"Amdahl's fit of the article, limit {fit.limit:.1f} x",
        color=SERIES[2],
    )
    prediction(ax, n, guess)
    ax.set_xticks(range(1, top + 1))
    show(fig, alt=f"{message}. The article's four cards: {times[0] / times[-1]:.2f} x. Ideal: {top} x on {top}.")
    say(
        f"Strong scaling on {n} ranks: {one_batch}; weak scaling: {batch_each}. {guess.against(one_batch)} "
        f"{strong_beside_weak(strong, weak)} Amdahl's fit of the article: {fit.serial:.2f} s that do not shrink and "
        f"{fit.parallel:.2f} s that do."
    )


def strong_beside_weak(strong: Records, weak: Records) -> str:
    """Which of the two is faster, and whether their ceilings say why. Two launches: there are no pairs to compare."""
    n = ranks_of(strong)
    ddp, copies = ([data_parallel.speedups(run)[mode, n] for run in (strong, weak)] for mode in ("ddp", "copies"))
    said = f"The copies reach {copies[0]} with a share of the batch each, and {copies[1]} with a whole one."
    order = _apart(*ddp)
    if not order:
        return f"That the two differ, these launches cannot show. {said}"
    if _apart(*copies) == order:
        alike = "and so do its copies, which exchange nothing: it is not DDP's doing alone"
        return f"Strong lies {order} weak, {alike}. {said}"
    if order == "above":
        return (
            f"Strong lies above weak, though a step is shorter and the bytes are the same. {said} They do not tell why."
        )
    return f"Strong lies below weak, as the model without overlap has it: the same bytes for a shorter step. {said}"


def _apart(a: Estimate, b: Estimate) -> str:
    """Whether the interval of `a` is wholly "above" or "below" that of `b`; "" if they overlap."""
    return "above" if a.low > b.high else "below" if a.high < b.low else ""


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
        by = "" if kind == "modelled" else ", by the medians"
        message = f"DDP on {n} ranks {verb} in {wins} of {len(cells)} cells{by}"
        fig, ax = figure(message, xlabel="samples per rank", ylabel="layer width", records=run, size=(6.2, 2.8))
        heat_map(
            ax,
            grid,
            columns=batches,
            rows=widths,
            kind=kind,
            center=1.0,
            span=span,
            label="speed-up (x), 1 = break-even",
        )
        show(fig, alt=f"{message}: from {min(cells.values()):.2f} to {max(cells.values()):.2f} times as fast.")
    say(_crossover_text(rows, guess))


def _crossover_text(rows: list[dict], guess: Prediction) -> str:
    wins = sum(r["measured"].value > 1 for r in rows)
    right, commoner, decided = crossover.score(rows)
    worst, best = (f(rows, key=lambda r: r["measured"].value) for f in (min, max))
    ratio = estimate([r["measured"].value / r["modelled"] for r in rows], "x")
    return (
        f"DDP won in {wins} of {len(rows)} cells, by the medians; in {len(rows) - decided} the interval holds 1, and "
        f"another run may turn them round. {guess.against(float(wins))} Of the {decided} others the model names the "
        f"winner in {right}; always naming the commoner one would name {commoner}. "
        f"Measured over modelled: {ratio}. It knows one rank's step and the link, not what DDP itself "
        "costs per step, nor what ranks take from each other. Worst:"
        f" width {worst['width']}, batch {worst['batch']}, {worst['measured']}; best: width {best['width']}, batch"
        f" {best['batch']}, {best['measured']}."
    )
