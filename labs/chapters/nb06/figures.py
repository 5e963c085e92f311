"""Figures and tables of notebook 06 about pipelines: who waits, and what micro-batches gain."""

from __future__ import annotations

import math

import pandas
from matplotlib.axes import Axes

from labs.common.pipelines import schedules
from labs.common.precision import rounding
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import estimate, paired_ratio
from labs.kit.plot import GREY, SERIES, curve, figure, log_axes, points, prediction, show, spans
from labs.kit.record import Records
from labs.pipeline_parallel import analysis

NAMES = {"naive": "naive", "gpipe": "GPipe", "1f1b": "1F1B"}
COLORS = {"forward": SERIES[0], "backward": SERIES[2], "send": SERIES[3], "receive": SERIES[1], "idle": "#E3E3E3"}


def halves(run: Records) -> pandas.DataFrame:
    """The article's split model: which half gets a gradient, how far it moves, and what accuracy comes of it."""
    rows = []
    for r in run.where("test_accuracy"):
        case = {k: r.case[k] for k in ("way", "loss")}
        first, second = (run.one("trained_parameters", half=h, **case).value for h in ("first", "second"))
        moved = run.one("moved", half="first", **case).value
        rows.append(
            {
                "second half gets": case["way"],
                "loss of": case["loss"],
                "first half": _trains(first, moved),
                "second half": _trains(second, 1.0),
                "test accuracy": f"{estimate(r.samples).value:.0%}",
                "first loss": f"{run.one('first_loss', **case).value:.2f}",
            }
        )
    return pandas.DataFrame(rows).set_index("second half gets")


def surprise(run: Records, guess: Prediction) -> None:
    """In words: the accuracy of the model whose first half never moves, against the guess and against the whole one."""
    broken, whole = (
        estimate([100 * s for s in run.one("test_accuracy", way=w, loss="logits").samples], "%")
        for w in ("received", "gradient sent back")
    )
    say(f"The first half at its random start: {broken}; both halves trained: {whole}. {guess.against(broken)}")


def _trains(tensors: float, moved: float) -> str:
    return "trains" if tensors and moved else "no gradient, stays as it was"


def timeline(run: Records, chain: str, micro_batches: int) -> None:
    """Figure: what each rank does during a step: the naive split above, 1F1B below, on one time axis."""
    both = {"naive": ("naive", 1), "1F1B": ("1f1b", micro_batches)}
    events = {name: analysis.timeline(run, chain, *key) for name, key in both.items()}
    length = {name: schedules.span_s(found) for name, found in events.items()}
    stages = run.where("timeline_s")[0].layout["world_size"]
    message = f"{micro_batches} micro-batches: {1000 * length['1F1B']:.0f} ms in place of {1000 * length['naive']:.0f}"
    fig, ax = figure(
        message,
        xlabel="milliseconds since the step began",
        ylabel="rank",
        records=run,
        size=(7.4, 3.9),
        legend_below=True,
    )
    rows = [f"{name}, rank {s}" for name in events for s in range(stages)]
    for action, color in COLORS.items():
        lasts = sum(e.end_s - e.start_s for found in events.values() for e in found if e.kind == action)
        if lasts < 0.002 * max(length.values()):
            continue  # thinner than a line, in all rows together
        for row in range(len(rows)):
            found, stage = list(events.values())[row // stages], row % stages
            times = [(1000 * e.start_s, 1000 * e.end_s) for e in found if e.stage == stage and e.kind == action]
            if times:
                spans(ax, row, times, label=action, color=color)
        _once(ax)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    show(fig, alt=f"{message}. In the naive split one rank waits while the other computes; with 1F1B both work.")


def _once(ax: Axes) -> None:
    """Keep one legend entry of each label."""
    seen: set[str] = set()
    for artist in ax.collections:
        label = str(artist.get_label())
        artist.set_label("_" if label in seen else label)
        seen.add(label)


def speed(run: Records, chain: str, guess: Prediction) -> None:
    """Figure: speed of 1F1B over the naive split against the number of micro-batches, with bubble, fit and ceiling."""
    found = {k[2]: v for k, v in analysis.speedups(run, chain).items() if k[0] == "1f1b" and k[1] == "hand"}
    fitted, many = analysis.fit(run, chain), sorted(found)
    key, p = analysis.best(run, chain), fitted.stages
    most = max(found, key=lambda m: found[m].value)
    message = f"{most} micro-batches: {found[most].value:.2f} times as fast as the naive split"
    fig, ax = figure(
        message, xlabel="micro-batches", ylabel="speed, naive split = 1 (x)", records=run, legend_below=True
    )
    points(ax, many, [found[m] for m in many], label="1F1B")
    every = [1, *many]
    curve(ax, every, [p * (1 - schedules.bubble(p, m)) for m in every], label="bubble alone", color=SERIES[2])
    curve(ax, every, [fitted.step_s(1) / fitted.step_s(m) for m in every], label="bubble + cost per micro-batch")
    naive, copies = (next(r for r in run.where("step_s", chain=chain, schedule=s)) for s in ("naive", "copies"))
    ceiling = paired_ratio([p * t for t in naive.samples], copies.samples)
    ax.axhline(ceiling.value, linestyle=":", color=GREY)
    ax.annotate("two copies that never talk (measured)", (1, ceiling.value), va="bottom", fontsize=10)
    prediction(ax, 8, guess)
    log_axes(ax, every)
    show(fig, alt=f"{message}. " + "; ".join(f"{m}: {found[m]}" for m in many))
    share = analysis.shares_of_ceiling(run, chain)[key]
    most = fitted.best_micro_batches
    fit_says = (
        f"by the fit {most:.0f} of them are best" if math.isfinite(most) else "this run cannot tell how many are best"
    )
    single = paired_ratio(naive.samples, next(r for r in run.where("step_s", chain=chain, schedule="single")).samples)
    best_way, cost_ms = f"{NAMES.get(key[0], key[0])} with {key[2]}", 1000 * fitted.per_micro_batch_s
    say(
        f"* The naive split takes {single} the time of one device alone.\n* With 8 micro-batches: {found[8]}. "
        f"{guess.against(found[8])}\n* The best of all, {best_way}, reaches {share} of the ceiling "
        f"that its bubble leaves. A micro-batch costs {cost_ms:.2g} ms beside its work; {fit_says}."
        + _left_out(run, chain)
    )


def _left_out(run: Records, chain: str) -> str:
    """A line on the numbers of micro-batches that there was no time for, or nothing."""
    found = run.where("left_out", chain=chain)
    numbers = ", ".join(str(r.case["micro_batches"]) for r in found)
    return f"\n* Not tried here: {numbers} micro-batches, as {found[0].case['why']}." if found else ""


def idle(run: Records, chain: str) -> pandas.DataFrame:
    """Share of a step in which a rank waits: the bubble's closed form, what events say, a micro-batch's cost."""
    rows = [
        {
            "schedule": NAMES[i.schedule],
            "micro-batches": i.micro_batches,
            "bubble (p-1)/(m+p-1)": f"{i.predicted:.0%}",
            "idle, measured": f"{i.measured.value:.0%}",
            "cost of a micro-batch / its work": f"{i.cost_share:.0%}",
        }
        for i in sorted(analysis.idle_shares(run, chain), key=lambda i: i.micro_batches)
    ]
    return pandas.DataFrame(rows).set_index("schedule")


def kept(run: Records, chain: str) -> pandas.DataFrame:
    """Activations that a rank keeps at most, by schedule: as many micro-batches as are in flight."""
    rows = []
    for r in run.where("kept_micro_batches", chain=chain):
        case = {k: r.case[k] for k in ("schedule", "micro_batches", "stage")}
        size = run.one("saved_bytes", chain=chain, **case).value
        rows.append(
            {
                "schedule": NAMES[case["schedule"]],
                "micro-batches": case["micro_batches"],
                "rank": case["stage"],
                "kept at once": int(r.value),
                "activations MB": round(size / 1e6, 1),
            }
        )
    return pandas.DataFrame(rows).set_index("schedule")


def parity(*runs: Records) -> None:
    """In words: gradients of every scheme against one process."""
    errors = [r for run in runs for r in run.where("gradient_relative_error")]
    names = sorted({str(r.case.get("schedule") or r.case.get("scheme") or r.case.get("way")) for r in errors})
    wrong = [r for run in runs for r in rounding.beyond(run)]
    word = "equal to one process's up to rounding" if not wrong else f"WRONG in {len(wrong)}"
    say(
        f"Gradients of {len(errors)} cases ({', '.join(names)}): **{word}**. The limit is {rounding.TIMES} times the "
        "distance of one process's gradient in FP32 from the same in FP64."
    )
