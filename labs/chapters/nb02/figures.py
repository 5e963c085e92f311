"""Figures and sentences of notebook 02 about loader and model; those about formats and traps are in nb02_data."""

from __future__ import annotations

import pandas

from labs import dataloader, tune_dataloader
from labs.chapters.nb02.claims_loading import quotient
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, estimate
from labs.kit.plot import SERIES, bars, figure, heat_map, log_axes, points, prediction, show, spans
from labs.kit.record import Record, Records
from labs.parts.tuning.report import Tuning

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
    near = [r for r in rows if abs(r["measured"].value / r["the slower one"] - 1) <= 0.15]
    message = f"The slower one decides: within 15 % of it in {len(near)} of {len(rows)} cases"
    fig, ax = figure(message, xlabel="images per second (logarithmic)", ylabel="model, num_workers", records=run,
                     size=(7.0, 5.0), legend_below=True)  # fmt: skip
    names = [f"{r['model']}, {r['workers']}" for r in rows]
    bars(ax, names, [r["measured"] for r in rows], label="both together")
    (mark,) = ax.plot([r["the slower one"] for r in rows], range(len(rows)), "|", color="black", markersize=17,
                      markeredgewidth=2, label="predicted from each alone (modelled)")  # fmt: skip
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
    say(_together_text(rows, [r for r in rows if r not in near], guess, rows[at]))


def _together_text(rows: list[dict], far: list[dict], guess: Prediction, at: dict) -> str:
    found = estimate(at["measured"].samples)
    lines = [f"* {at['model']}, {_workers(at['workers'])}: {_rate(at['measured'])}. {guess.against(found)}"]
    for r in far:
        ratio, shared = r["measured"].value / r["the slower one"] - 1, r["measured"].value / r["shared cores"] - 1
        why = "what it costs to hand batches over, and this run's noise, are in no formula"
        if abs(shared) < abs(ratio) - 0.02:
            why = f"model and workers share the cores; counted in CPU seconds, {shared:+.0%} remain"
        lines.append(f"* {r['model']}, {_workers(r['workers'])}: {ratio:+.0%} from the formula: {why}.")
    return "\n".join(lines)


def waiting(run: Records) -> None:
    """Figure: share of each step spent waiting for data, by model and number of workers."""
    models = list(dict.fromkeys(r.case["model"] for r in run.where("wait_share")))
    heavy = run.where("wait_share", model=models[-1])
    least = min(heavy, key=lambda r: r.value)
    message = f"The {models[-1]} model waits {least.value:.0%} of its time with {_workers(least.case['workers'])}"
    fig, ax = figure(message, xlabel="num_workers", ylabel="share of the step\nspent waiting (%)", records=run,
                     size=(6.6, 3.5), legend_below=True)  # fmt: skip
    counts = sorted({r.case["workers"] for r in run.where("wait_share")})
    for k, model in enumerate(models):
        rows = [run.one("wait_share", model=model, workers=n) for n in counts]
        points(ax, range(len(counts)), [estimate(r.samples).scaled(100, "%") for r in rows], label=MODELS[model],
               line=True, color=SERIES[k])  # fmt: skip
    ax.axhline(5, linestyle=":", color="black")
    ax.annotate("5 %", (-0.12, 5), ha="left", va="bottom", fontsize=10)
    ax.set_xticks(range(len(counts)), [str(n) for n in counts])
    ax.set_ylim(0, 100)
    shares = run.where("wait_share")
    cells = "; ".join(f"{r.case['model']}, {_workers(r.case['workers'])}: {r.value:.0%}" for r in shares)
    show(fig, alt=f"{message}. {cells}.")


def timelines(run: Records) -> None:
    """Two figures: who loaded which batch when, and when the trainer waited, for the lightest and heaviest model."""
    for model in dict.fromkeys(r.case["model"] for r in run.where("start_s")):
        who = [r.case["who"] for r in run.where("start_s", model=model)]
        workers = sorted(w for w in who if w.startswith("worker"))
        found = {w: _spans(run, model, w) for w in who}
        begin, end = found["trains"][0][0], found["trains"][-1][1]
        waited = sum(b - a for a, b in found["waits"] if a >= begin) / (end - begin)
        message = f"{MODELS[model].capitalize()}: waits {waited:.0%} of the time after its first batch"
        fig, ax = figure(message, xlabel="time since the loader was made (s)", ylabel="process", records=run,
                         size=(7.0, 2.9), legend_below=True)  # fmt: skip
        spans(ax, 0, found["waits"], label="waits", color="#BDBDBD")
        spans(ax, 0, found["trains"], label="trains", color=SERIES[0])
        for k, w in enumerate(workers):
            spans(ax, k + 1, found[w], label="loads a batch" if k == 0 else "", color=SERIES[4])
        ax.set_yticks(range(len(workers) + 1), ["trainer", *workers])
        ax.set_ylim(len(workers) + 0.6, -0.6)
        show(fig, alt=f"{message}; {len(workers)} workers load the batches in turn while the trainer works.")


def _spans(run: Records, model: str, who: str) -> list[tuple[float, float]]:
    starts, ends = (run.one(edge, model=model, who=who).samples for edge in ("start_s", "end_s"))
    return list(zip(starts, ends, strict=True))


def sweep_map(run: Records, guess: Prediction) -> None:
    """Figure: the loader alone over workers and batch size."""
    cells = {(r.case["batch"], r.case["workers"]): r.value for r in run.where("images_per_s", way="sweep")}
    batches, workers = sorted({b for b, _ in cells}), sorted({w for _, w in cells})
    best = max(cells, key=lambda c: cells[c])
    message = f"Best here: {_workers(best[1])}, batches of {best[0]}: {cells[best]:,.0f} images/s"
    fig, ax = figure(message, xlabel="num_workers", ylabel="batch size", records=run, size=(6.4, 3.0))
    grid = [[cells[b, w] for w in workers] for b in batches]
    heat_map(ax, grid, columns=workers, rows=batches, form="{:,.0f}", label="images per second")
    show(fig, alt=f"{message}; the slowest cell has {min(cells.values()):,.0f}.")
    cores = cores_of(run)
    beyond = " More workers than cores bring nothing where decoding is the work." if best[1] <= cores else ""
    say(f"{cores} cores; the fastest cell has {_workers(best[1])}. {guess.against(float(best[1]))}{beyond}")


def settings_table(run: Records) -> pandas.DataFrame:
    """What other settings do: prefetch_factor with the middle model, and what is sent with the light one."""
    rows = {}
    for r in run.where("images_per_s", way="both"):
        if "prefetch_factor" in r.case:
            rows[f"prefetch_factor={r.case['prefetch_factor']}, {r.case['model']} model"] = _rate(r)
        if "send" in r.case:
            size = run.one("batch_bytes", send=r.case["send"]).value / 1e6
            rows[f"send {r.case['send']}: {size:.2f} MB per batch, {r.case['model']} model"] = _rate(r)
    return pandas.DataFrame({"both together": rows})


def settings_text(run: Records) -> None:
    """Whether this run shows any difference between the settings of the table, in words."""
    both = run.where("images_per_s", way="both")
    queues = [r for r in both if "prefetch_factor" in r.case]
    sent = {r.case["send"]: r for r in both if "send" in r.case}
    lines = []
    if len(queues) > 1:
        first, last = queues[0], queues[-1]
        what = f"prefetch_factor={last.case['prefetch_factor']} over {first.case['prefetch_factor']}"
        lines.append(_difference(what, last, first))
    if {"uint8", "float32"} <= set(sent):
        lines.append(_difference("uint8 over float32", sent["uint8"], sent["float32"]))
    say("\n".join(f"* {line}" for line in lines))


def _difference(what: str, a: Record, b: Record) -> str:
    ratio = quotient(a, b)  # each took as many batches as there was time for: there are no pairs
    return f"{what}: {ratio}" + ("." if differs(ratio) else ", no difference that this run can show.")


def pinned(run: Records) -> None:
    """pin_memory and non_blocking, where there is a GPU; one honest sentence where there is none."""
    rows = [r for r in run.where("images_per_s", way="both") if "pin_memory" in r.case]
    if not rows:
        return say(
            "Pinned memory and asynchronous copies need a GPU: without one there is nothing to copy to, and "
            "`pin_memory=True` only warns. No recorded GPU run of this lab exists yet, so no number is shown."
        )
    lines = [f"* pin_memory={r.case['pin_memory']}, non_blocking={r.case['non_blocking']}: {_rate(r)}" for r in rows]
    return say("\n".join(lines))


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
        top = max(r.value for r in tuning.records.where(way="both together"))
        prediction(fig.axes[0], places.index(f"{float(guess):g}"), top)
    rates = "; ".join(f"{r.case['way']} {r.case.get('workers', '')}: {r.value:,.0f}" for r in tuning.records)
    show(fig, alt=f"The search settled on {tuning.choice.setting}. Samples per second: {rates}.")
    say(guess.against(float(tuning.choice.setting.workers)))


def tuned_text(run: Records) -> None:
    """How near the tuned setting comes to the best of a full sweep, and in what share of its time."""
    for row in tune_dataloader.verdicts(run):
        say(
            f"{row['workload']}: the search settled on {_workers(row['workers'])} (limit: {row['limit']}) in "
            f"{row['share_of_time']:.0%} of the time of the sweep; in turn, that setting reaches "
            f"{row['share_of_best'].scaled(100, '%')} of the best one of the sweep."
        )
