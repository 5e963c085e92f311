"""Figures and sentences of notebook 01 about what limits a step: utilisation, the batch, the learning rate."""

from __future__ import annotations

import math

import pandas

from labs import batch_size
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, estimate, paired_ratio
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records

TICKS = (0.001, 0.01, 0.1, 1, 10, 100)


def utilisation(run: Records, guess: Prediction) -> None:
    """Figure: how busy a device looks and how much of its speed it reaches, job by job, in percent."""
    jobs = [r.case["job"] for r in run.where("busy_share")]
    busy, reached = (
        [estimate(run.one(metric, job=j).samples).scaled(100, "%") for j in jobs]
        for metric in ("busy_share", "share_of_peak")
    )
    top = max(b.value for b in busy)  # on a machine that others use, no job gets the whole of it
    full = [e for e, b in zip(reached, busy, strict=True) if b.value > top / 2]
    factor = max(e.value for e in full) / min(e.value for e in full)
    message = f"Of the jobs that look busy, one does {float(f'{factor:.1g}'):,.0f} times the work of another"
    fig, ax = figure(message, xlabel="percent (logarithmic)", ylabel="job", records=run, legend_below=True)
    bars(ax, jobs, busy, label=f"busy: {run.where('busy_share')[0].case['counter']}")
    bars(ax, jobs, reached, label="share of the best rate seen here")
    slow = jobs.index("one number at a time")
    prediction(ax, float(guess), slow)
    low = min(e.low for e in reached)
    ax.set_xscale("log")
    ticks = [t for t in (1e-5, 1e-4, *TICKS) if t >= low / 10]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    rows = "; ".join(
        f"{j}: busy {b.value:.0f} %, reaches {float(f'{e.value:.2g}'):g} %"
        for j, b, e in zip(jobs, busy, reached, strict=True)
    )
    show(fig, alt=f"{message}. {rows}.")
    wait = busy[jobs.index("waiting for data")]
    say(
        f"* One number at a time: {guess.against(reached[slow])}\n* Waiting for data: busy {wait}. "
        f"{_busy_text(jobs, busy, reached)}"
    )


def _busy_text(jobs: list[str], busy: list[Estimate], reached: list[Estimate]) -> str:
    """Which jobs look as busy as the fastest one and are slow, and whether a wait shows."""
    top, wait = busy[0], busy[jobs.index("waiting for data")]
    slow = [j for j, b, e in zip(jobs, busy, reached, strict=True) if b.value > 0.9 * top.value and e.high < 10]
    seen = "Whether a planted wait shows cannot be told"
    if wait.high < 0.9 * top.value or wait.low >= 0.9 * top.value:
        seen = "A wait shows in the counter" if wait.high < 0.9 * top.value else "Even a planted wait does not show"
    lazy = f"; slow work does not: {', '.join(slow)}" if slow else "; no job that looks busy was slow here"
    return f"{seen}{lazy}. Work done per second tells both."


WAYS = {"train": "one device", "no_sync": "DDP without its exchange (no_sync)", "ddp": "DDP"}


def mfu_table(runs: dict[str, Records]) -> pandas.DataFrame:
    """Model FLOP utilisation of each run: FLOPs that the model needs, over what the device can do meanwhile.

    With several ranks a step is one of DDP, given with and without its exchange of gradients.
    """
    rows = {}
    for model, run in runs.items():
        flop, best = run.one("step_flop").value, run.one("peak_flop_s")
        for step in sorted(run.where("step_s"), key=lambda r: r.case["mode"]):
            way = "ddp" if step.layout["world_size"] > 1 and step.case["mode"] == "train" else step.case["mode"]
            rows[model, WAYS[way]] = {
                "MFLOP per step and rank": f"{float(f'{flop / 1e6:.3g}'):,g}",
                "time of a step": str(estimate(step.samples, "s")),
                "MFU": str(estimate([100 * flop / s / best.value for s in step.samples], "%")),
                "best rate seen": f"{best.case.get('kernel', '?')}, {best.value / 1e9:.3g} GFLOP/s",
            }
    table = pandas.DataFrame(rows).T
    table.index.names = ["model", "a step of"]
    return table


def throughput(run: Records, guess: Prediction) -> None:
    """Figure: samples per second against the batch, alone and with DDP, and curves through two points of each."""
    n, knees = run[0].layout["world_size"], {}
    found = {mode: batch_size.throughput(run, mode) for mode in ("single", "ddp")}
    one, fit = found["single"], batch_size.fit_ends(run)
    bend = batch_size.knee(run)
    if bend and fit.sample_s and fit.fixed_s:
        half = f"half of the limit at a batch of {bend.value:.0f}"
    else:
        half = f"no {'fixed part of a step' if fit.sample_s else 'cost per sample'} to be seen"
    message = f"One device: {half}{_more(run)}"
    fig, ax = figure(
        message,
        xlabel="batch size of each device",
        ylabel="samples per second",
        records=run,
        size=(6.6, 3.5),
        legend_below=True,
    )
    for mode, label in (("single", "one device"), ("ddp", f"{n} devices, DDP")):
        if found[mode]:
            color, fit = SERIES[len(knees)], batch_size.fit_ends(run, mode)
            ranks = 1 if mode == "single" else n
            knees[label] = (fit, bend if mode == "single" else batch_size.knee(run, mode))
            points(ax, list(found[mode]), list(found[mode].values()), label=label, color=color)
            grid = _grid(min(one), max(one))
            through = f"{label}, through batches {fit.small} and {fit.large}"
            curve(ax, grid, [ranks * fit.samples_per_s(b) for b in grid], label=through, color=color)
    alone, _ = knees["one device"]
    if alone.sample_s and alone.fixed_s:
        prediction(ax, float(guess), alone.samples_per_s(math.inf) / 2, label="half of the limit, one device")
    ax.axvspan(32, 256, color="#EFEFEF", zorder=0)
    ax.annotate("the article's range", (91, 0), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=10)
    log_axes(ax, list(one))
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + ", ".join(f"{b}: {e.value:,.0f}" for b, e in one.items()))
    say(_throughput_text(run, one, knees, guess))


def _throughput_text(run: Records, one: dict[int, Estimate], knees: dict, guess: Prediction) -> str:
    lines, times = [], batch_size.latency(run)
    for label, (fit, half) in knees.items():
        if not fit.sample_s or not fit.fixed_s or half is None:
            what = "a step costs whatever its batch" if fit.sample_s and half else "a sample costs"
            lines.append(
                f"* {label}: batches {fit.small} and {fit.large} alone cannot tell in this run what {what}. "
                "Run the cell again, on a quiet machine or with more rounds."
            )
            continue
        said = f" {guess.against(half, 'modelled')}" if label == "one device" else ""
        lines.append(
            f"* {label}: {fit.fixed_s * 1e3:.2f} ms that do not depend on the batch and {fit.sample_s * 1e6:.1f} µs "
            f"per sample, by the medians; fitted round by round, half of the limit is at {half}.{said}"
        )
    small, large = min(one), max(one)
    lines.append(
        f"* One device, from batch {small} to {large}: {one[large].value / one[small].value:.1f} times the "
        f"throughput, {times[large].value / times[small].value:.0f} times the time of a step, and activations "
        f"grow with the batch: {_bytes(run, small)} to {_bytes(run, large)}."
    )
    return "\n".join(lines)


def _more(run: Records) -> str:
    """What the largest batch gains over 256, where the article stops; nothing if there was none."""
    steps = {r.case["batch"]: r.samples for r in run.where("step_s", mode="single")}
    top = max(steps)
    if 256 not in steps or top == 256:
        return ""
    ratio = paired_ratio(steps[256], steps[top]).scaled(top / 256)
    if not differs(ratio):
        return "; beyond 256 no gain is shown"
    return f"; beyond 256 there is {100 * abs(ratio.value - 1):.0f} % to {'gain' if ratio.value > 1 else 'lose'}"


def _bytes(run: Records, batch: int) -> str:
    return f"{run.one('activation_bytes', batch=batch).value / 1e6:.2g} MB"


def _grid(low: float, high: float, steps: int = 60) -> list[float]:
    return [low * (high / low) ** (k / steps) for k in range(steps + 1)]


def communication(run: Records, guess: Prediction) -> None:
    """Figure: the share of a DDP step that synchronisation takes, against the batch of each rank."""
    if not len(run.where("step_s", mode="ddp")):
        return say("One rank exchanges nothing: run with NPROC = 2 or more.")
    found = {b: e.scaled(100, "%") for b, e in batch_size.communication_share(run).items()}
    small, large = min(found), max(found)
    message = (
        f"Synchronising gradients: {found[small].value:.0f} % of a step at batch {small}, "
        f"{found[large].value:.0f} % at {large}"
    )
    fig, ax = figure(
        message,
        xlabel="batch size of each rank",
        ylabel="share of the step (%)",
        records=run,
        size=(6.6, 3.5),
        legend_below=True,
    )
    points(ax, list(found), list(found.values()), label="synchronising gradients: 1 - no_sync / DDP", line=True)
    modelled = batch_size.modelled_share(run)
    curve(ax, list(modelled), [100 * v for v in modelled.values()], label="the same if nothing overlaps")
    prediction(ax, 64 if 64 in found else small, guess)
    log_axes(ax, list(found))
    ax.set_ylim(0, 100)
    show(fig, alt=f"{message}. " + ", ".join(f"{b}: {e.value:.0f} %" for b, e in found.items()))
    at = found.get(64, found[small])
    size = run.one("gradient_bytes").value / 1e6
    return say(
        f"The same {size:.2f} MB travel in every step, whatever the batch: per sample, a larger batch exchanges less. "
        f"At batch {64 if 64 in found else small}: {at}. {guess.against(at)}"
    )
