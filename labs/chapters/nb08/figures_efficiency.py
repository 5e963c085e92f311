"""Figures and sentences of notebook 08 on what more ranks buy: scaling laws, the critical batch, waiting, failures."""

from __future__ import annotations

import pandas

from labs import slowest_rank
from labs.common.checkpoints import checkpoint_interval
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import SERIES, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records

DAY_S = checkpoint_interval.DAY_S


# -- 5: strong, weak, and what counts


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
