"""Figures and sentences of notebook 03 on scaling: strong and weak, Amdahl's fit, crossover, break-even."""

from __future__ import annotations

import math

import pandas

from labs import crossover, data_parallel
from labs.chapters.nb03.figures import ranks_of
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, curve, figure, heat_map, ideal, points, prediction, show
from labs.kit.record import Records
from labs.parts.data_parallel import scaling
from labs.parts.models.large_models import resnet_50, vgg_16
from labs.parts.sources.published import rtx_3090_images, rtx_4090_epochs


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


def published_table() -> pandas.DataFrame:
    """Speed-up of 8 RTX 3090 over 1 by model and batch, as published: the crossover map of real cards."""
    run = rtx_3090_images()
    rows: dict[str, dict[int, str]] = {}
    for one, eight in zip(run.where("images_per_s", ranks=1), run.where("images_per_s", ranks=8), strict=True):
        rows.setdefault(one.case["model"], {})[one.case["batch"]] = f"{eight.value / one.value:.2f} x"
    table = pandas.DataFrame(rows).T.fillna("not published")
    table.index.name, table.columns.name = "speed-up of 8 cards over 1 (published)", "images per card and step"
    return table


def published_text() -> str:
    """Where 8 cards do less than 4, how large the models are, and what the table leaves open."""
    run = rtx_3090_images()
    rate = {tuple(r.case.values()): r.value for r in run}
    cases = list(dict.fromkeys((model, batch) for model, batch, _ in rate))
    worse = [case for case in cases if rate[*case, 8] < rate[*case, 4]]
    listed = "; ".join(f"{model}, batch {batch}" for model, batch in worse) or "none"
    model, batch = worse[0] if worse else cases[0]
    vgg, resnet = (sum(p.numel() for p in m.parameters()) for m in (vgg_16(), resnet_50()))
    largest = max(p.numel() for p in vgg_16().parameters())
    return (
        f"In {len(worse)} of {len(cases)} cases 8 cards do less than 4 ({listed}). Images/s of {model} with {batch} "
        f"images per card on 1, 2, 4 and 8 cards: {', '.join(f'{rate[model, batch, k]:,.0f}' for k in (1, 2, 4, 8))}."
        f"\n\nVGG-16 has {vgg / 1e6:.1f} million parameters, {largest / vgg:.0%} of them in its first fully connected "
        f"layer; ResNet-50 has {resnet / 1e6:.1f} million (counted from their papers' tables). That the bytes of "
        f"the gradients set them apart is our guess: this table does not test it.\n\n"
        f"Source: {run[0].provenance['source']}."
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


def break_even_text(run: Records, samples: int = 60_000) -> None:
    """After how many epochs of `samples` samples DDP has earned back its start-up, from this run."""
    n = ranks_of(run)
    single, ddp = run.one("step_s", mode="single"), run.one("step_s", mode="ddp", ranks=n)
    epoch_1 = samples / single.case["batch_per_rank"] * single.value
    epoch_n = samples / (n * ddp.case["batch_per_rank"]) * ddp.value
    listed = ", ".join(f"{r.case['phase']} {r.value:.2f} s" for r in run.where("startup_s"))
    said = (
        f"Start-up: {listed}. An epoch of {samples:,} samples takes {epoch_1:.1f} s on one rank and {epoch_n:.1f} s"
        f" on {n}: {_earned_back(run, data_parallel.startup_s(run), samples)}. "
    )
    cold_s = data_parallel.cold_startup_s(run)
    if cold_s is None:
        say(f"{said}A torchrun from cold also imports torch in every rank; here it was there already.")
        return
    say(
        f"{said}A torchrun from cold also imports torch in every rank, which took {run.one('import_torch_s').value:.1f}"
        f" s here: {_earned_back(run, cold_s, samples)} with that in it."
    )


def _earned_back(run: Records, start_s: float, samples: int) -> str:
    epochs = data_parallel.break_even_epochs(run, start_s, samples)
    if math.isinf(epochs.low):
        return "it is never earned back"
    if math.isinf(epochs.high):
        return "whether DDP ever earns it back, this run cannot tell"
    return f"DDP has earned it back after {epochs} epochs"
