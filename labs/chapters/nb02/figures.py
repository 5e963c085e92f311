"""Figures and sentences of notebook 02 about loader and model; those about formats and traps are in nb02_data."""

from __future__ import annotations

import math

import pandas

from labs import dataloader, tune_dataloader
from labs.common.loading.rates import compared, counted, may_be_equal
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, bars, figure, heat_map, log_axes, points, prediction, show, spans
from labs.kit.record import Record, Records
from labs.tune_dataloader.report import Tuning

MODELS = {"light": "light model", "even": "even model", "heavy": "heavy model"}


def cores_of(run: Records) -> int:
    """Cores of the machine that made `run`, from its provenance."""
    return int(run.provenance["cores"])


def speeds(run: Records) -> None:
    """The three numbers in words: each model alone, and the loader alone by number of workers."""
    alone = [f"{MODELS[r.case['model']]} {_rate(r)}" for r in run.where("images_per_s", way="model")]
    loader = [f"{_workers(r.case['workers'])} {_rate(r)}" for r in run.where("images_per_s", way="loader")]
    say(f"* Models alone, on one stored batch: {', '.join(alone)}.\n* The loader alone: {', '.join(loader)}.")


def _workers(n: int) -> str:
    return f"{n} worker" if n == 1 else f"{n} workers"


def _rate(r: Record) -> str:
    e = estimate(r.samples)
    return f"{e.value:,.0f} images/s [{e.low:,.0f}, {e.high:,.0f}]"


def together(run: Records, guess: Prediction, model: str = "even", workers: int = 1) -> None:
    """Figure: model and loader together, measured and predicted from each alone, for every model and worker count."""
    rows = dataloader.comparisons(run, cores_of(run))
    fed = [r for r in rows if r["workers"]] or rows  # without workers the formula adds the two times
    near = [r for r in fed if abs(r["measured"].value / r["the slower one"] - 1) <= 0.15]
    right = "The slower one decides" if 2 * len(near) > len(fed) else "The slower one does not decide alone"
    message = f"{right}: with workers, within 15 % of it in {len(near)} of {len(fed)} cases"
    fig, ax = figure(
        message,
        xlabel="images per second (logarithmic)",
        ylabel="model, num_workers",
        records=run,
        size=(7.0, 5.0),
        legend_below=True,
    )
    names = [f"{r['model']}, {r['workers']}" for r in rows]
    bars(ax, names, [r["measured"] for r in rows], label="both together")
    (mark,) = ax.plot(
        [r["the slower one"] for r in rows],
        range(len(rows)),
        "|",
        color="black",
        markersize=17,
        markeredgewidth=2,
        label="predicted from each alone (modelled)",
    )
    mark.set_gid("kind:modelled")
    at = next((i for i, r in enumerate(rows) if (r["model"], r["workers"]) == (model, workers)), 0)
    prediction(ax, float(guess), at)
    values = [v for r in rows for v in (r["measured"].value, r["the slower one"])]
    ticks = [50 * 2**k for k in range(8) if min(values) / 2 < 50 * 2**k < 2 * max(values)]
    log_axes(ax, ticks)
    show(
        fig,
        alt=f"{message}. " + "; ".join(f"{n}: {r['measured'].value:,.0f}" for n, r in zip(names, rows, strict=True)),
    )
    say(_together_text([r for r in rows if _misses(r)], guess, rows[at]))


def _misses(row: dict) -> bool:
    """Whether the interval of what was measured leaves out the formula's value."""
    found = estimate(row["measured"].samples)
    return not found.low <= row["the slower one"] <= found.high


def _together_text(far: list[dict], guess: Prediction, at: dict) -> str:
    found = estimate(at["measured"].samples)
    lines = [f"* {at['model']}, {_workers(at['workers'])}: {_rate(at['measured'])}. {guess.against(found)}"]
    for r in sorted(far, key=lambda r: -abs(math.log(r["measured"].value / r["the slower one"])))[:3]:
        ratio, shared = r["measured"].value / r["the slower one"] - 1, r["measured"].value / r["shared cores"] - 1
        why = "what it costs to hand batches over, and this run's noise, are in no formula"
        if abs(shared) <= abs(ratio) / 2:  # else sharing the cores is not what explains it
            why = f"model and workers share the cores: that can explain it; in CPU seconds, {shared:+.0%} remain"
        elif abs(shared) < abs(ratio) - 0.02:
            why = f"shared cores can explain the smaller part of it; in CPU seconds, {shared:+.0%} remain"
        lines.append(f"* {r['model']}, {_workers(r['workers'])}: {ratio:+.0%} from the formula: {why}.")
    if len(far) > 3:
        lines.append(f"* {len(far) - 3} more are nearer to it than these three.")
    return "\n".join(lines)


def waiting(run: Records) -> None:
    """Figure: share of each step spent waiting for data, by model and number of workers."""
    models = list(dict.fromkeys(r.case["model"] for r in run.where("wait_share")))
    heavy = run.where("wait_share", model=models[-1])
    least = min(heavy, key=lambda r: r.value)
    message = f"The {models[-1]} model waits {least.value:.0%} of its time with {_workers(least.case['workers'])}"
    fig, ax = figure(
        message,
        xlabel="num_workers",
        ylabel="share of the step\nspent waiting (%)",
        records=run,
        size=(6.6, 3.5),
        legend_below=True,
    )
    counts = sorted({r.case["workers"] for r in run.where("wait_share")})
    for k, model in enumerate(models):
        rows = [run.one("wait_share", model=model, workers=n) for n in counts]
        points(
            ax,
            range(len(counts)),
            [estimate(r.samples).scaled(100, "%") for r in rows],
            label=MODELS[model],
            line=True,
            color=SERIES[k],
        )
    ax.axhline(5, linestyle=":", color="black")
    ax.annotate("5 %", (-0.12, 5), ha="left", va="bottom", fontsize=10)
    ax.set_xticks(range(len(counts)), [str(n) for n in counts])
    ax.set_ylim(0, 100)
    shares = run.where("wait_share")
    cells = "; ".join(f"{r.case['model']}, {_workers(r.case['workers'])}: {r.value:.0%}" for r in shares)
    show(fig, alt=f"{message}. {cells}.")
    say(_fed_text(run, [r for r in shares if r.case["workers"]]))


def _fed_text(run: Records, shares: list[Record]) -> str:
    """Of the cases with workers whose loader alone is shown to be faster than the model: how many hardly wait."""
    faster = []
    for r in shares:
        loader = run.one("images_per_s", way="loader", workers=r.case["workers"])
        model = run.one("images_per_s", way="model", model=r.case["model"])
        if loader.value > model.value and not may_be_equal(loader, model):
            faster.append(r)
    few = sum(estimate(r.samples).high < 0.05 for r in faster)
    told = f"In {len(faster)} of {len(shares)} cases with workers, the loader alone is shown to be the faster one"
    return told + (f"; in {few} of these, the model is shown to wait for less than 5 % of its time." if faster else ".")


def timelines(run: Records) -> None:
    """Two figures: who loaded which batch when, and when the trainer waited, for the lightest and heaviest model."""
    for model in dict.fromkeys(r.case["model"] for r in run.where("start_s")):
        who = [r.case["who"] for r in run.where("start_s", model=model)]
        workers = sorted(w for w in who if w.startswith("worker"))
        found = {w: _spans(run, model, w) for w in who}
        begin, end = found["trains"][0][0], found["trains"][-1][1]
        waited = sum(b - a for a, b in found["waits"] if a >= begin) / (end - begin)
        message = f"{MODELS[model].capitalize()}: waits {waited:.0%} of the time after its first batch"
        fig, ax = figure(
            message,
            xlabel="time since the loader was made (s)",
            ylabel="process",
            records=run,
            size=(7.0, 2.9),
            legend_below=True,
        )
        spans(ax, 0, found["waits"], label="waits", color="#BDBDBD")
        spans(ax, 0, found["trains"], label="trains", color=SERIES[0])
        for k, w in enumerate(workers):
            spans(ax, k + 1, found[w], label="loads a batch" if k == 0 else "", color=SERIES[4])
        ax.set_yticks(range(len(workers) + 1), ["trainer", *workers])
        ax.set_ylim(len(workers) + 0.6, -0.6)
        show(fig, alt=f"{message}; {len(workers)} workers load the batches in turn while the trainer works.")
        say(_who_waits(MODELS[model], waited, _busy(found, workers, begin, end)))


def _busy(found: dict[str, list[tuple[float, float]]], workers: list[str], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end` that the workers load, mean over them."""
    loads = [min(b, end) - max(a, begin) for w in workers for a, b in found[w] if b > begin and a < end]
    return sum(loads) / len(workers) / (end - begin)


def _who_waits(model: str, waited: float, busy: float) -> str:
    """Which of the two holds the other back, from the shares of the time that the trainer waits and workers load."""
    told = f"{model.capitalize()}: the trainer waits {waited:.0%} of the time, the workers load {busy:.0%} of it. "
    if waited > 0.1 and busy > 0.8:
        return told + "The workers hardly pause: the loader limits."
    if waited < 0.1 and busy < 0.8:
        return told + "The workers pause, the trainer hardly does: the model limits."
    return told + "These shares alone do not tell which of the two limits."


def _spans(run: Records, model: str, who: str) -> list[tuple[float, float]]:
    starts, ends = (run.one(edge, model=model, who=who).samples for edge in ("start_s", "end_s"))
    return list(zip(starts, ends, strict=True))


def sweep_map(run: Records, guess: Prediction) -> None:
    """Figure: the loader alone over workers and batch size, and which cells cannot be told from the fastest."""
    rows = {(r.case["batch"], r.case["workers"]): r for r in run.where("images_per_s", way="sweep")}
    batches, workers = sorted({b for b, _ in rows}), sorted({w for _, w in rows})
    best, tied = dataloader.as_fast(run, way="sweep")
    place = f"{counted(best.case['workers'])}, batches of {best.case['batch']}"
    message = f"Fastest here: {place}, {best.value:,.0f} images/s"
    if len(tied) > 1:
        message = f"{len(tied)} of {len(rows)} cells may be the fastest; the highest median: {place}"
    fig, ax = figure(message, xlabel="num_workers", ylabel="batch size", records=run, size=(6.4, 3.0))
    grid = [[rows[b, w].value for w in workers] for b in batches]
    heat_map(ax, grid, columns=workers, rows=batches, form="{:,.0f}", label="images per second")
    show(fig, alt=f"{message}; the slowest cell has {min(r.value for r in rows.values()):,.0f} images/s.")
    say(_sweep_text(run, rows, best, tied, guess))


def _sweep_text(run: Records, rows: dict, best: Record, tied: list[Record], guess: Prediction) -> str:
    cores, batch = cores_of(run), best.case["batch"]
    lines = [
        f"* {cores} cores; the cell with the highest median has {counted(best.case['workers'])}. "
        f"{guess.against(float(best.case['workers']))}"
    ]
    if others := [r for r in tied if r is not best]:
        named = "; ".join(f"{counted(r.case['workers'])}, batches of {r.case['batch']}" for r in others)
        lines.append(f"* These samples cannot tell it from cells with {named}.")
    most, as_many = max(w for _, w in rows), max((w for _, w in rows if w <= cores), default=0)
    if most > cores and as_many:
        told = f"{counted(most)}, more than cores, over {counted(as_many)}, in batches of {batch}"
        lines.append(f"* {compared(rows[batch, most], rows[batch, as_many], told)}.")
    return "\n".join(lines)


def first_batches(run: Records) -> pandas.DataFrame:
    """Seconds until the first batch of each epoch: start method and persistent workers."""
    rows = {}
    for r in run.where("first_batch_s"):
        n, method = r.case["workers"], r.case["start_method"]
        name = "no workers" if n == 0 else f"{n} by {method}" + (", persistent" if r.case["persistent"] else "")
        rows[name] = {f"epoch {k + 1}": str(Estimate(s, s, s, 1, "s")).split(" [")[0] for k, s in enumerate(r.samples)}
    return pandas.DataFrame(rows).T


def tuning_figure(tuning: Tuning, guess: Prediction) -> None:
    """Figure: what the search measured; the guess is the number of workers."""
    fig = tuning.figure()
    places = [t.get_text().splitlines()[0] for t in fig.axes[0].get_xticklabels()]
    if f"{float(guess):g}" in places:
        both = tuning.records.where(way="both together") or tuning.records  # none where the time was over before
        top = max(r.value for r in both)
        prediction(fig.axes[0], places.index(f"{float(guess):g}"), top)
    rates = "; ".join(f"{r.case['way']} {r.case.get('workers', '')}: {r.value:,.0f}" for r in tuning.records)
    show(fig, alt=f"The search settled on {tuning.choice.setting}. Samples per second: {rates}.")
    say(guess.against(float(tuning.choice.setting.workers)))


def tuned_text(run: Records) -> None:
    """How near the tuned setting comes to the best of a full sweep, and in what share of its time."""
    say("\n".join(f"* {tune_dataloader.told(row)}" for row in tune_dataloader.verdicts(run)))
