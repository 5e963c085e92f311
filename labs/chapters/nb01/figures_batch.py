"""Figures and sentences of notebook 01 about what limits a step: utilisation, the batch, the learning rate."""

from __future__ import annotations

import math

import pandas

from labs import batch_size, lr_scaling
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
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
    message = f"Busy is not fast: two jobs look busy, one does {float(f'{factor:.1g}'):,.0f} times the work"
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
    say(f"* One number at a time: {guess.against(reached[slow])}\n* Waiting for data: busy {wait}. Low utilisation "
        "proves that something waits; high utilisation proves nothing. Only work done per second does.")  # fmt: skip


def polls(run: Records) -> None:
    """The same bursts of work read by counters of different speed, in words."""
    lines = []
    for r in sorted(run.where("polled_share"), key=lambda r: -r.case["window_s"]):
        low, high = min(r.samples), max(r.samples)
        lines.append(f"* read every {r.case['window_s']:g} s: {len(r.samples)} readings from {low:.0%} to {high:.0%}")
    say("\n".join(lines))


def mfu_table(runs: dict[str, Records]) -> pandas.DataFrame:
    """Model FLOP utilisation of each run: FLOPs that the model needs, over what the device can do meanwhile."""
    rows = {}
    for model, run in runs.items():
        step, flop = run.one("step_s", mode="train"), run.one("step_flop").value
        peak = run.one("peak_flop_s").value
        mfu = estimate([100 * flop / s / peak for s in step.samples], "%")
        rows[model] = {
            "MFLOP per step and rank": f"{float(f'{flop / 1e6:.3g}'):,g}",
            "step": str(estimate(step.samples, "s")),
            "MFU": str(mfu),
        }
    return pandas.DataFrame(rows).T


def throughput(run: Records, guess: Prediction) -> None:
    """Figure: samples per second against the batch, alone and with DDP, and curves through two points of each."""
    n, knees = run[0].layout["world_size"], {}
    found = {mode: batch_size.throughput(run, mode) for mode in ("single", "ddp")}
    one, fit = found["single"], batch_size.fit_ends(run)
    half = f"Half of the speed at a batch of {fit.half_batch:.0f}" if fit.sample_s else "No cost per sample to be seen"
    message = f"{half}; beyond 256 {_more(one)}"
    fig, ax = figure(message, xlabel="batch size of each device", ylabel="samples per second", records=run,
                     size=(6.6, 3.5), legend_below=True)  # fmt: skip
    for mode, label in (("single", "one device"), ("ddp", f"{n} devices, DDP")):
        if found[mode]:
            color, fit = SERIES[len(knees)], batch_size.fit_ends(run, mode)
            ranks = 1 if mode == "single" else n
            knees[label] = (fit, ranks)
            points(ax, list(found[mode]), list(found[mode].values()), label=label, color=color)
            grid = _grid(min(one), max(one))
            through = f"{label}, through batches {fit.small} and {fit.large}"
            curve(ax, grid, [ranks * fit.samples_per_s(b) for b in grid], label=through, color=color)
    alone, _ = knees["one device"]
    if alone.sample_s:
        prediction(ax, float(guess), alone.samples_per_s(math.inf) / 2, label="half speed, one device")
    ax.axvspan(32, 256, color="#EFEFEF", zorder=0)
    ax.annotate("the article's range", (91, 0), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=10)
    log_axes(ax, list(one))
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + ", ".join(f"{b}: {e.value:,.0f}" for b, e in one.items()))
    say(_throughput_text(run, one, knees, guess))


def _throughput_text(run: Records, one: dict[int, Estimate], knees: dict, guess: Prediction) -> str:
    lines, times = [], batch_size.latency(run)
    for label, (fit, _) in knees.items():
        if not fit.sample_s:
            lines.append(f"* {label}: batch {fit.large} took no longer than {fit.small}, so this run cannot tell what "
                         "a sample costs. Run the cell again, on a quiet machine or with more rounds.")  # fmt: skip
            continue
        said = f" {guess.against(fit.half_batch)}" if label == "one device" else ""
        lines.append(
            f"* {label}: {fit.fixed_s * 1e3:.2f} ms that do not depend on the batch and {fit.sample_s * 1e6:.1f} µs "
            f"per sample: half of the speed at batch {fit.half_batch:.0f}.{said}"
        )
    small, large = min(one), max(one)
    lines.append(f"* One device, from batch {small} to {large}: {one[large].value / one[small].value:.1f} times the "
                 f"throughput, {times[large].value / times[small].value:.0f} times the time of a step, and activations "
                 f"grow with the batch: {_bytes(run, small)} to {_bytes(run, large)}.")  # fmt: skip
    return "\n".join(lines)


def _more(found: dict[int, Estimate]) -> str:
    top, last = max(found), found.get(256)
    gain = found[top].value / last.value - 1 if last else 0.0
    return f"there is {100 * gain:.0f} % to gain" if gain > 0.02 else "there is nothing to gain"


def _bytes(run: Records, batch: int) -> str:
    return f"{run.one('activation_bytes', batch=batch).value / 1e6:.2g} MB"


def _grid(low: float, high: float, steps: int = 60) -> list[float]:
    return [low * (high / low) ** (k / steps) for k in range(steps + 1)]


def activation_table(run: Records) -> pandas.DataFrame:
    """Bytes kept for backward, by batch: deterministic, counted not timed."""
    rows = {r.case["batch"]: {"activations (kB)": r.value / 1e3, "per sample (kB)": r.value / 1e3 / r.case["batch"]}
            for r in run.where("activation_bytes")}  # fmt: skip
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
    fig, ax = figure(message, xlabel="batch size of each rank", ylabel="share of the step (%)", records=run,
                     size=(6.6, 3.5), legend_below=True)  # fmt: skip
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
        f"The same {size:.2f} MB travel whatever the batch. {guess.against(at)} A larger batch does not make the "
        "exchange faster; it makes it rarer."
    )


RULES = {"same": "same rate", "linear": "linear", "linear, warm-up": "linear, warm-up",
         "sqrt, warm-up": "square root, warm-up"}  # fmt: skip


def learning_rates(config: lr_scaling.Config) -> pandas.DataFrame:
    """The learning rate that each rule gives each batch, after any warm-up. Modelled."""
    rows = {
        config.base_batch * f: {name: lr_scaling.final_rate(config, rule, f) for rule, name in RULES.items()}
        for f in config.factors
    }
    table = pandas.DataFrame(rows).T.round(4)
    table.index.name = "batch"
    return table


def lr_figure(run: Records, guess: Prediction) -> None:
    """Figure: test accuracy after equal epochs against the batch, one line per rule."""
    rules = list(dict.fromkeys(r.case["rule"] for r in run.where("test_accuracy")))
    batches = sorted({r.case["batch"] for r in run.where("test_accuracy")})
    base = run.one("test_accuracy", rule="same", batch=batches[0])
    last = batches[0] * lr_scaling.holds_until(run, "linear, warm-up")
    message = f"Linear scaling with warm-up holds up to batch {last}" + ("" if last == batches[-1] else ", then breaks")
    broken = min((b for b in batches if b > last), default=last)
    if any(last < r.case["batch"] < broken for r in run.where("left_out")):
        message = f"Linear scaling with warm-up breaks somewhere between batch {last} and {broken}"
    fig, ax = figure(message, xlabel="batch size", ylabel="test accuracy (%)", records=run, size=(7.0, 4.3))
    for k, rule in enumerate(rules):
        rows = [
            run.one("test_accuracy", rule=rule, batch=b)
            for b in batches
            if len(run.where("test_accuracy", rule=rule, batch=b))
        ]
        x = [r.case["batch"] * 1.05 ** (k - 1.5) for r in rows]
        points(ax, x, [_percent(r) for r in rows], label=RULES[rule], line=True)
    ax.axhline(100 * base.value, linestyle=":", color="black")
    prediction(ax, float(guess), 100 * base.value, label="breaks at")
    log_axes(ax, batches)
    show(
        fig,
        alt=f"{message}. " + "; ".join(f"{rule}, batch {b}: {_at(run, rule, b)}" for rule in rules for b in batches),
    )
    say(_lr_text(run, rules, batches, last, guess))


def _percent(r: Record) -> Estimate:
    return estimate(r.samples).scaled(100, "%")


def _at(run: Records, rule: str, batch: int) -> str:
    found = run.where("test_accuracy", rule=rule, batch=batch)
    return str(_percent(found[0])) if len(found) else "not run"


def _lr_text(run: Records, rules: list[str], batches: list[int], last: int, guess: Prediction) -> str:
    base = run.one("test_accuracy", rule="same", batch=batches[0])
    broken = [b for b in batches if b > last]
    end = f"loses more at {broken[0]}. {guess.against(float(broken[0]))}" if broken else "was tried with no larger one."
    lines = [
        f"* Batch {batches[0]}: {_percent(base)} over {len(base.samples)} seeds. Linear scaling with warm-up is not "
        f"shown to lose a point up to batch {last}; it {end}"
    ]
    for rule in rules:
        gone = sum(r.value for r in run.where("diverged", rule=rule))
        end = f"; {gone:.0f} trainings of this rule diverged" if gone else ""
        lines.append(f"* {RULES[rule]}: {_at(run, rule, batches[-1])} at batch {batches[-1]}{end}")
    if len(untried := run.where("left_out")):
        left = ", ".join(str(r.case["batch"]) for r in untried)
        lines.append(f"* Not tried here: batch {left}, as {untried[0].case['why']}.")
    return "\n".join(lines)


def imagenet_table() -> pandas.DataFrame:
    """Goyal et al. 2017: ResNet-50 on ImageNet, error by batch and warm-up. Published."""
    rows = [
        {"batch": r.case["batch"], "warm-up": r.case["warm_up"], "error %": r.value, "±": r.case["plus_minus"]}
        for r in imagenet_batches()
    ]
    return pandas.DataFrame(rows).set_index("batch")
