"""Figures and sentences of notebook 01 about what limits a step: utilisation, the batch, the learning rate."""

from __future__ import annotations

import math

import pandas

from labs import batch_size, lr_scaling
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, estimate, paired_ratio
from labs.kit.plot import GREY, SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Record, Records
from labs.parts.sources.published import imagenet_batches

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


def polls(run: Records) -> None:
    """The same bursts of work read by counters of different speed, in words."""
    lines, readers = [], sorted(run.where("polled_share"), key=lambda r: -r.case["window_s"])
    for r in readers:
        low, high = min(r.samples), max(r.samples)
        lines.append(f"* read every {r.case['window_s']:g} s: {len(r.samples)} readings from {low:.0%} to {high:.0%}")
    slow, fast = (max(r.samples) - min(r.samples) for r in (readers[0], readers[-1]))
    lines.append(
        "* The slow reader sees means of work and rest, which a steady load of that height would give, too."
        if fast > 2 * slow
        else "* Reading more often shows no more here."
    )
    say("\n".join(lines))


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


def activation_table(run: Records) -> pandas.DataFrame:
    """Bytes kept for backward, by batch: deterministic, counted not timed."""
    rows = {
        r.case["batch"]: {"activations (kB)": r.value / 1e3, "per sample (kB)": r.value / 1e3 / r.case["batch"]}
        for r in run.where("activation_bytes")
    }
    table = pandas.DataFrame(rows).T.round(2)
    table.index.name = "batch"
    return table


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


RULES = {
    "same": "same rate",
    "linear": "linear",
    "linear, warm-up": "linear, warm-up",
    "sqrt, warm-up": "square root, warm-up",
    "AdamW, linear, warm-up": "AdamW: linear, warm-up",
    "AdamW, sqrt, warm-up": "AdamW: square root, warm-up",
}
SAID = {"keeps": "keeps all but a point", "loses": "loses more than a point", "cannot be told": "cannot be told"}
LEAST_POINTS = -12.0
"""Below, a change of accuracy is drawn at the edge of the figure."""


def learning_rates(config: lr_scaling.Config) -> pandas.DataFrame:
    """The learning rate that each rule gives each batch, after any warm-up. Modelled."""
    rows = {
        config.base_batch * f: {name: lr_scaling.final_rate(config, rule, f) for rule, name in RULES.items()}
        for f in config.factors
    }
    table = pandas.DataFrame(rows).T.round(4)
    table.index.name = "batch"
    return table


def rule_text(config: lr_scaling.Config) -> None:
    """What was chosen beforehand: the base rates and the length of the warm-up."""
    say(
        f"SGD's rate for batch {config.base_batch}, {config.base_lr:g}, was chosen beforehand, as the largest that was "
        "as good there as smaller ones. To try that again: `python -m labs.lr_scaling --factors 1 --rules same --rates "
        f"0.25 0.5 2 --adamw-factors 1 --seeds 24`. AdamW's is {config.adamw_lr:g}. A warm-up takes "
        f"{100 * config.warm_up_share:.0f} % of all steps, more than the 5 of 90 epochs of Goyal et al."
    )


def lr_figure(run: Records, guess: Prediction) -> None:
    """Figure: change of test accuracy against the smallest batch after equal epochs, one line per rule."""
    rules = list(dict.fromkeys(r.case["rule"] for r in run.where("test_accuracy")))
    batches = {r.case["factor"]: r.case["batch"] for r in run.where("test_accuracy")}
    changes = {case: e.scaled(100, "points") for case, e in lr_scaling.change(run).items()}
    kept = batches[lr_scaling.keeps_until(run, "linear, warm-up")]
    lost = batches.get(lr_scaling.loses_from(run, "linear, warm-up"))
    said = [f"keeps all but a point up to batch {kept}"] if kept > min(batches.values()) else []
    said += [f"loses more than {'one' if said else 'a point'} at {_lost_text(run, lost)}"] if lost else []
    message = f"Linear scaling with warm-up {', '.join(said) or 'cannot be judged by these seeds'}"
    fig, ax = figure(
        message,
        xlabel="batch size",
        records=run,
        size=(7.0, 4.6),
        legend_below=True,
        ylabel=f"test accuracy against batch {min(batches.values())}\n(percentage points)",
    )
    ax.axhspan(-1, 1, color="#EFEFEF", zorder=0)
    below = []
    for k, rule in enumerate(rules):
        found = {batches[f]: e for (r, f), e in changes.items() if r == rule and f > 1}
        inside = {b: e for b, e in found.items() if e.value > LEAST_POINTS}
        places = [b * 1.06 ** (k - len(rules) / 2) for b in inside]
        points(ax, places, list(inside.values()), label=RULES[rule], color=SERIES[k % len(SERIES)], line=True)
        if found and not inside:
            ax.plot([], [], "v", color=SERIES[k % len(SERIES)], label=f"{RULES[rule]} (measured)")
        for b in found.keys() - inside.keys():
            ax.annotate(
                "▼", (b * 1.06 ** (k - len(rules) / 2), LEAST_POINTS), ha="center", color=SERIES[k % len(SERIES)]
            )
            below.append(f"{RULES[rule]} at {b}: {found[b]}")
    if below:
        ax.plot([], [], "v", color=GREY, label="triangle: lower than drawn")
    prediction(ax, float(guess), -1, label="loses a point")
    ticks = [float(b) for f, b in batches.items() if f > 1]  # the change of the smallest batch is 0
    outside = 0 < float(guess) < min(ticks) / 1.3 or max(ticks) * 1.3 < float(guess) < math.inf
    log_axes(ax, sorted([*ticks, float(guess)] if outside else ticks))  # a star beyond the ticks could not be read
    ax.set_ylim(LEAST_POINTS - 0.6, 3)
    said = "; ".join(f"{rule}, batch {batches[f]}: {e}" for (rule, f), e in changes.items() if f > 1)
    show(fig, alt=f"{message}. The grey band is one point. {said}")
    say(_lr_text(run, batches, lost, guess, below))


def _percent(r: Record) -> Estimate:
    return estimate(r.samples).scaled(100, "%")


def _lr_text(run: Records, batches: dict[int, int], lost: int | None, guess: Prediction, below: list[str]) -> str:
    """What each rule is shown to keep and to lose, seed by seed, and what these seeds cannot tell."""
    accuracies, base, lines = run.where("test_accuracy"), min(batches.values()), []
    for rule in dict.fromkeys(r.case["rule"] for r in accuracies):
        first = run.one("test_accuracy", rule=rule, factor=1)
        words = lr_scaling.judged(run, rule)
        said = [
            f"{SAID[w]} at {', '.join(str(batches[f]) for f in words if words[f] == w)}"
            for w in SAID
            if w in words.values()
        ]
        gone = sum(r.value for r in run.where("diverged", rule=rule))
        end = f"; {gone:.0f} trainings diverged" if gone else ""
        lines.append(f"* {RULES[rule]} (batch {base}: {_percent(first)}): {'; '.join(said)}{end}.")
    seeds = len(accuracies[0].samples)
    told = "Linear scaling with warm-up is not shown to lose one point."
    if lost:
        told = guess.against(Estimate(lost, min([*_untried_below(run, lost), lost]), lost, seeds))
        if float(guess) in _untried_below(run, lost):
            told = f"You predicted {float(guess):g}, which was not tried here: this run cannot tell."
    lines.append(f"* What is kept and lost is shown by the interval of {seeds} differences, seed by seed. {told}")
    if below:
        lines.append(f"* Below the figure, in points: {'; '.join(below)}.")
    if len(untried := run.where("left_out")):
        left = ", ".join(str(r.case["batch"]) for r in untried)
        lines.append(f"* Not tried here: batch {left}, as {untried[0].case['why']}.")
    return "\n".join(lines)


def _untried_below(run: Records, batch: int) -> list[int]:
    """Smaller batches that there was no time for: the first loss may lie at one of them."""
    return [r.case["batch"] for r in run.where("left_out") if r.case["batch"] < batch]


def _lost_text(run: Records, lost: int) -> str:
    return f"{lost} or before" if _untried_below(run, lost) else f"{lost}"


def imagenet_table() -> pandas.DataFrame:
    """Goyal et al. 2017: ResNet-50 on ImageNet, error by batch and warm-up. Published."""
    rows = [
        {"batch": r.case["batch"], "warm-up": r.case["warm_up"], "error %": r.value, "±": r.case["plus_minus"]}
        for r in imagenet_batches()
    ]
    return pandas.DataFrame(rows).set_index("batch")
