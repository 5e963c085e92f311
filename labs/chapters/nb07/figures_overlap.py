"""Figures and sentences of notebook 07 on DDP's buckets."""

from __future__ import annotations

import pandas

from labs import bucket_overlap, ddp_overlap
from labs.chapters.nb07.figures import milliseconds
from labs.common.communication import wire
from labs.common.data_parallel import step_timeline
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs
from labs.kit.plot import curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records


def timeline(run: Records, guess: Prediction) -> None:
    """One step of median length on every rank of a paced wire; then what is exposed, by timeline and by clock."""
    found = ddp_overlap.overlap(run)
    message = f"{found.hidden.value:.0f}% of the time in all-reduces is hidden at {run[0].config['mb_s']:g} MB/s"
    fig = step_timeline.draw(run, message)
    show(fig, alt=f"{message}: of {found.under_way} with all-reduces under way, {found.exposed} are exposed.")
    lines = [guess.against(found.hidden), *list(ddp_overlap.answer(run))[1:]]
    say("\n".join(f"* {line}" for line in lines))


def bucket_counts(run: Records) -> pandas.DataFrame:
    """Buckets of each size: in DDP's first step, from the second on, and by closed form."""
    rows = {}
    for record in run.where("bucket_bytes"):
        cap, step = record.case["bucket_cap_mb"], record.case["step"]
        name = "by closed form" if record.kind == "modelled" else f"{step} step" if step == "first" else "later steps"
        rows.setdefault(cap, {})[name] = len(record.samples)
    table = pandas.DataFrame(rows).T
    table.index.name = "bucket_cap_mb"
    return table[["first step", "later steps", "by closed form"]]


def buckets(run: Records, guess: Prediction) -> None:
    """A step by bucket size: measured, predicted, and the step without communication."""
    steps = run.where("step_s", synchronise=True)
    caps = [r.case["bucket_cap_mb"] for r in steps]
    best, worst, ratio = bucket_overlap.best_worst(run)
    message = "The size of the buckets makes no difference that this run can show"
    if differs(ratio):
        found = bucket_overlap.best_text(run)
        message = f"{found[0].upper()}{found[1:]} here; with {worst:g} MiB a step takes {ratio.value:.2f} times as long"
    fig, ax = figure(message, xlabel="bucket_cap_mb (MiB)", ylabel="milliseconds of a step", records=run)
    points(ax, caps, [milliseconds(r) for r in steps], label="DDP", line=True)
    predicted = bucket_overlap.predicted_steps(run)
    curve(ax, caps, [1e3 * predicted[c] for c in caps], label="one bucket after the other on the wire")
    plain = run.one("step_s", synchronise=False)
    points(ax, [caps[-1] * 2], [milliseconds(plain)], label="no_sync: no exchange, no buckets")
    prediction(ax, float(guess), steps.one("step_s", bucket_cap_mb=best).value * 1e3)
    log_axes(ax, caps)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. Without communication {milliseconds(plain)}.")
    say(_buckets_text(run, predicted, guess, best, ratio))


def _buckets_text(run: Records, predicted: dict[float, float], guess: Prediction, best: float, ratio: Estimate) -> str:
    off = {
        r.case["bucket_cap_mb"]: 100 * (predicted[r.case["bucket_cap_mb"]] / r.value - 1)
        for r in run.where("step_s", synchronise=True)
    }
    worst = max(off, key=lambda cap: abs(off[cap]))
    chosen = min(predicted, key=predicted.get)
    tied = bucket_overlap.not_slower(run)
    lines = [
        guess.against(Estimate(best, tied[0], tied[-1], len(run.one("step_s", synchronise=False).samples), "MiB")),
        f"The prediction would choose {chosen:g} MiB. It is {abs(off[worst]):.0f}% "
        f"{'above' if off[worst] > 0 else 'below'} the measurement at worst, with {worst:g} MiB.",
        f"The slowest size against the fastest, round by round: {ratio}. Both were picked from these rounds, "
        "which makes the ratio somewhat too large.",
        *wire.label(run),
    ]
    return "\n".join(f"* {line}" for line in lines)
