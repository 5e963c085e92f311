"""Figures and sentences of notebook 08 on what more ranks buy: scaling laws, the critical batch, waiting, failures."""

from __future__ import annotations

import math

import pandas

from labs import critical_batch, data_parallel, slowest_rank
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate
from labs.kit.plot import GREY, SERIES, TINTS, curve, figure, ideal, log_axes, points, prediction, show
from labs.kit.record import Records
from labs.parts.checkpoints import checkpoint_interval
from labs.parts.data_parallel import scaling

DAY_S = checkpoint_interval.DAY_S
RANKS = tuple(2**k for k in range(7))
"""To which the two laws are drawn: far beyond what was measured, which is the point."""


# -- 5: strong, weak, and what counts


def serial_share(strong: Records) -> Estimate:
    """The share of one rank's step that more ranks do not shorten (Karp-Flatt), between 0 and 1."""
    n = strong[0].layout["world_size"]
    faster = data_parallel.speedups(strong)["ddp", n]
    ends = [min(1.0, max(0.0, scaling.karp_flatt(s, n))) for s in (faster.value, faster.high, faster.low)]
    return Estimate(*ends, n=faster.n)


def two_laws(strong: Records, weak: Records, guess: Prediction) -> None:
    """Amdahl's and Gustafson's answer from the same serial share, and what was measured."""
    n, share = strong[0].layout["world_size"], serial_share(strong)
    law = scaling.Amdahl(share.value, 1 - share.value)
    message = (
        f"If {share.value:.0%} do not shrink, 64 ranks give {law.speedup(64):.0f} x (strong) or "
        f"{scaling.gustafson(share.value, 64):.0f} x (weak)"
    )
    fig, ax = figure(message, xlabel="ranks", ylabel="speed-up (x)", records=strong + weak, legend_below=True)
    measured = {name: data_parallel.speedups(run)["ddp", n] for name, run in (("strong", strong), ("weak", weak))}
    points(ax, [n], [measured["strong"]], label="strong scaling: one batch is shared", color=SERIES[1])
    points(ax, [1.04 * n], [measured["weak"]], label="weak scaling: each rank has its own", color=SERIES[0])
    curve(ax, RANKS, [law.speedup(k) for k in RANKS], label="Amdahl", color=SERIES[1])
    curve(ax, RANKS, [scaling.gustafson(share.value, k) for k in RANKS], label="Gustafson", color=SERIES[0])
    prediction(ax, 0.8 * n, guess)  # beside what was measured, not upon it
    log_axes(ax, RANKS, RANKS)
    ideal(ax, RANKS)
    show(fig, alt=f"{message}. Measured on {n} ranks: strong {measured['strong']}, weak {measured['weak']}.")
    told = scaling.gustafson(share.value, n)
    held = measured["weak"].low <= told <= measured["weak"].high
    say(
        f"{guess.against(measured['weak'])} From strong scaling alone, the share that does not shrink is {share}; "
        f"Gustafson's formula then says {told:.2f} x for weak scaling on {n} ranks, {measured['weak']} was measured"
        f"{': within the interval' if held else ': the share is not the same in both'}. Beyond {n} ranks both lines "
        f"are formulas: that the share stays what it is, {n} ranks cannot tell."
    )


def steps_figure(run: Records, guess: Prediction) -> None:
    """Steps to the target by batch, the fit, and the noise scale that was estimated without any of it."""
    by, (fewest, batch) = critical_batch.steps(run), critical_batch.critical(run)
    told, target = critical_batch.noise(run), run[0].config["target"]
    message = f"At a batch of about {batch.value:.0f} the steps are twice the fewest"
    fig, ax = figure(
        message, xlabel="samples per step", ylabel=f"steps to a loss of {target:g}", records=run, legend_below=True
    )
    points(ax, list(by), by.values(), label="median of all seeds")
    xs = [min(by) * 2 ** (k / 4) for k in range(4 * int(math.log2(max(by) / min(by))) + 1)]
    curve(
        ax,
        xs,
        [critical_batch.predict_steps(b, fewest.value, batch.value) for b in xs],
        label="fewest x (1 + critical / batch)",
        color=SERIES[0],
    )
    if told:
        ax.axvspan(min(told.values()), max(told.values()), color=TINTS[1], zorder=0)
        ax.annotate(
            "noise scale\nalong the way",
            (min(told.values()), max(e.value for e in by.values())),
            va="top",
            fontsize=10,
            color=GREY,
        )
    log_axes(ax, list(by), [2**k for k in range(4, 13) if 0.7 * fewest.value < 2**k < 1.5 * by[min(by)].value])
    ax.axvline(batch.value, linestyle=":", color="black")
    prediction(ax, float(guess), 2 * fewest.value)
    show(fig, alt=f"{message}. " + ", ".join(f"batch {b}: {e}" for b, e in by.items()) + ".")
    say(
        f"{guess.against(batch)} The fewest steps are {fewest}; the fit is within "
        f"{100 * critical_batch.fit_error(run):.0f} % of every median. {noise_text(run)}"
    )


def noise_text(run: Records) -> str:
    """What the gradient noise scale says, by both methods, and whether it tells the critical batch."""
    ranks, single = critical_batch.noise(run), critical_batch.noise(run, "single samples")
    both = [ranks[step] / single[step] for step in ranks if step in single]
    if not both:
        return "The noise scale could not be estimated: noise is all there is in so few draws."
    critical = critical_batch.critical(run)[1].value
    low, high = min(ranks.values()), max(ranks.values())
    where = "inside" if low <= critical <= high else "outside"
    first, last = ranks[min(ranks)], ranks[max(ranks)]
    return (
        f"From the norms that ranks have before and after the all-reduce the noise scale is "
        f"{min(both):.2f} to {max(both):.2f} times that from the gradients of single samples. Along one training it "
        f"goes from {first:.0f} to {last:.0f} samples while the loss falls; the critical batch is {where} of the range "
        f"that it passes through, {low:.0f} to {high:.0f}. That is a factor of {high / low:.0f}: it tells the order of "
        "magnitude, not the batch."
    )


def two_efficiencies(run: Records) -> pandas.DataFrame:
    """For every batch: samples/s over the most (hardware), fewest samples over samples needed (statistical), both."""
    _, critical = critical_batch.critical(run)
    step_s = {r.case["batch"]: r.value for r in run.where("step_s", way="one rank")}
    most = max(b / s for b, s in step_s.items())
    rows = []
    for batch, seconds in critical_batch.time_to_target(run).items():
        hardware, statistical = batch / step_s[batch] / most, 1 / (1 + batch / critical.value)
        rows.append(
            {
                "batch": batch,
                "hardware": f"{hardware:.0%}",
                "statistical": f"{statistical:.0%}",
                "both": f"{hardware * statistical:.0%}",
                "time to the loss": str(seconds),
            }
        )
    return pandas.DataFrame(rows).set_index("batch")


def time_figure(run: Records, guess: Prediction) -> None:
    """Time to the target by batch, on one rank and on all of them."""
    ways = {way: found for way in ("one rank", "all ranks") if (found := critical_batch.time_to_target(run, way))}
    best, seconds = critical_batch.quickest(run)
    n, target = run[0].layout["world_size"], run[0].config["target"]
    message = f"One rank is quickest at a loss of {target:g} with batch {_or(_near(ways['one rank']))}"
    fig, ax = figure(message, xlabel="samples per step, over all ranks", ylabel="time of all steps (s)", records=run)
    for color, (way, found) in zip(SERIES, ways.items(), strict=False):
        label = way if way == "one rank" else f"{n} ranks, DDP"
        points(ax, list(found), found.values(), label=label, color=color, line=True)
    batches = sorted({b for found in ways.values() for b in found})
    values = [e.value for found in ways.values() for e in found.values()]
    ticks = [m * 10.0**k for k in range(-4, 4) for m in (1, 3) if min(values) / 2 < m * 10.0**k < 2 * max(values)]
    log_axes(ax, batches, ticks)
    prediction(ax, float(guess), seconds.value)
    show(
        fig,
        alt=f"{message}. "
        + "; ".join(f"{w}: " + ", ".join(f"{b}: {e}" for b, e in f.items()) for w, f in ways.items())
        + ".",
    )
    said = [f"Quickest on one rank: batch {best}, {seconds}{_tied(ways['one rank'])}; you predicted {float(guess):g}."]
    if "all ranks" in ways:
        other, together = critical_batch.quickest(run, "all ranks")
        gain = seconds.value / together.value
        verdict = f"{gain:.1f} times as fast" if gain > 1 else f"{1 / gain:.1f} times as slow"
        said.append(
            f"On {n} ranks: batch {other}, {together}{_tied(ways['all ranks'])}, {verdict} by the medians. The "
            "steps are the same on both; what differs is the time of one."
        )
    say(" ".join(said))


def _near(found: dict[int, Estimate]) -> list[int]:
    """Batches whose interval reaches that of the quickest: this run cannot tell which of them it is."""
    best = min(found.values(), key=lambda e: e.value)
    return [b for b, e in found.items() if e.low <= best.high]


def _or(batches: list[int]) -> str:
    return " or ".join(map(str, batches))


def _tied(found: dict[int, Estimate]) -> str:
    near = _near(found)
    return f" (by the intervals it may be {_or(near)})" if len(near) > 1 else ""


# -- 6: sixteen thousand GPUs


def waiting(run: Records, guess: Prediction) -> None:
    """Mean step by ranks with two kinds of planted delay of the same mean: formula, planted, measured."""
    kinds = {kind: slowest_rank.measured(run, kind) for kind in slowest_rank.KINDS}
    n, config = max(kinds["rare"]), run[0].config
    ratio = kinds["rare"][n].value / kinds["exponential"][n].value
    message = (
        f"The same mean delay of {config['mean_ms']:g} ms: rare long ones cost {n} ranks {ratio:.1f} times the step"
    )
    if kinds["rare"][n].low <= kinds["exponential"][n].high:
        message = f"Whether rare long delays cost {n} ranks more, so few steps cannot tell"
    fig, ax = figure(
        message, xlabel="ranks that wait for each other", ylabel="mean step (ms)", records=run, legend_below=True
    )
    for color, (kind, found) in zip(SERIES, kinds.items(), strict=False):
        name = "in every step, small" if kind == "exponential" else f"in {config['rare_share']:.0%} of steps, long"
        points(ax, list(found), [e.scaled(1e3, "ms") for e in found.values()], label=name, color=color)
        told = slowest_rank.formula(run, kind)
        curve(ax, list(told), [1e3 * s for s in told.values()], label=name, color=color)
    prediction(ax, n, float(guess))
    log_axes(ax, sorted(kinds["rare"]))
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + "; ".join(f"{kind} on {n} ranks: {found[n]}" for kind, found in kinds.items()) + ".")
    say("\n".join([f"* {guess.against(kinds['rare'][n].scaled(1e3, 'ms'))}", *map("* {}".format, _waits(run, n))]))


def _waits(run: Records, n: int) -> list[str]:
    lines = []
    for kind in slowest_rank.KINDS:
        found, told, lots = (f(run, kind) for f in (slowest_rank.measured, slowest_rank.formula, slowest_rank.planted))
        lines.append(
            f"{kind}: {n} ranks take {found[n]}; the formula says {1e3 * told[n]:.1f} ms, and the delays that this "
            f"run drew {1e3 * lots[n]:.1f} ms. Measured is {1e3 * (found[n].value - lots[n]):.1f} ms more than planted."
        )
    return lines


def real_waiting(run: Records, guess: Prediction) -> None:
    """In words: what one rank's list of real step times says of the slowest of n, beside what was measured."""
    first, worst, told = slowest_rank.real(run)
    n = len(run.where("real_step_s"))
    if n == 1:
        return say("One core, so one rank: how long the slowest of two takes could not be measured here.")
    extra, said = worst.value / first.value - 1, told / first.value - 1
    beyond = slowest_rank.beyond_one_list(run)
    if beyond.high < 0:
        why = "less than independent delays make it; a guess: the ranks are late together more often than by chance"
    elif beyond.low > 0:
        why = "more than one list makes it; a guess: a rank is slower than the one whose times were taken"
    else:
        why = "what independent delays make it, as far as this run can tell"
    return say(
        f"{guess.against(100 * extra)} One rank takes {first}, the slowest of {n} "
        f"{worst}: {100 * extra:.1f} % more. One rank's list of times foretells "
        f"{100 * said:.1f} %. That is {why}."
    )


SAVE_S, RESTART_S = 60.0, 600.0
"""Of a save and of a restart at scale: our round numbers. One's own are measured in notebook 05."""


def failures(guess: Prediction) -> None:
    """Share of the wall clock lost at the best interval, against GPUs, with the failures of one published training."""
    published = checkpoint_interval.llama_3()
    of_one = published.one("mtbf_s", gpus=1).value
    gpus = [2**k for k in range(3, 18)]
    lost = {
        name: [100 * _least_lost(save_s, of_one / g) for g in gpus]
        for name, save_s in (("save stops training 60 s", SAVE_S), ("6 s", SAVE_S / 10))
    }
    at = published.one("interruptions").case["gpus"]
    mtbf_s = published.one("mtbf_s", gpus=at).value
    best = checkpoint_interval.optimum(SAVE_S, mtbf_s)
    here = 100 * _least_lost(SAVE_S, mtbf_s)
    message = (
        f"A failure every {mtbf_s / 3600:.1f} h costs {here:.0f} % of the time if a save takes {SAVE_S:.0f} s; "
        "published is less than 10 %"
    )
    fig, ax = figure(message, xlabel="GPUs of one job", ylabel="time lost (%)", records=published)
    for color, (name, y) in zip(SERIES, lost.items(), strict=False):
        curve(ax, gpus, y, label=name, color=color)
    ax.axvline(at, linestyle=":", color="black")
    prediction(ax, at, guess)
    log_axes(ax, gpus[::2])
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}; with a save of 6 s {100 * _least_lost(SAVE_S / 10, mtbf_s):.0f} %.")
    say(
        f"{guess.against(here, 'modelled')} Published: {published.one('interruptions').value:.0f} unexpected "
        f"interruptions in 54 days. So a GPU with its share of everything else fails once in "
        f"{of_one / DAY_S / 365.25:.1f} years, and the job once in {mtbf_s / 3600:.1f} h. Daly's interval for a save "
        f"of {SAVE_S:.0f} s: {checkpoint_interval.daly(SAVE_S, mtbf_s) / 60:.1f} min (exact: {best / 60:.1f}). A "
        f"restart is taken to last {RESTART_S / 60:.0f} min; save and restart are our numbers, not the paper's. Its "
        "authors report more than 90 % of the time as effective: by this model they saved or restarted faster than we "
        f"assume. With a save of {SAVE_S / 10:.0f} s the model says {100 * _least_lost(SAVE_S / 10, mtbf_s):.0f} %."
    )


def _least_lost(save_s: float, mtbf_s: float) -> float:
    return checkpoint_interval.lost_share(checkpoint_interval.optimum(save_s, mtbf_s), save_s, mtbf_s, RESTART_S)


def failures_table() -> pandas.DataFrame:
    """From a workstation to Llama 3's cluster: how often something fails, how often to save, what is lost."""
    of_one = checkpoint_interval.llama_3().one("mtbf_s", gpus=1).value
    rows = []
    for gpus in (8, 128, 1024, 16_384, 131_072):
        mtbf_s = of_one / gpus
        rows.append(
            {
                "GPUs": f"{gpus:,}",
                "a failure every": _span(mtbf_s),
                "save every": _span(checkpoint_interval.optimum(SAVE_S, mtbf_s)),
                "lost": f"{100 * _least_lost(SAVE_S, mtbf_s):.1f} %",
            }
        )
    return pandas.DataFrame(rows).set_index("GPUs")


def _span(seconds: float) -> str:
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:,.0f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.0f} min"
