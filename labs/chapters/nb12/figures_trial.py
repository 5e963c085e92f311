"""Figures of notebook 12: whom the doctor accused of what, and what it promised against what the cures gave."""

from __future__ import annotations

from pathlib import Path

from labs import doctor_trial as trial
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate
from labs.kit.plot import GREY, bars, figure, log_axes, name_points, points, prediction, show
from labs.kit.record import Records

RECORDED = Path(__file__).parents[3] / "records" / "cpu-2-cores-2026-11" / "doctor_trial.jsonl"
"""Of `python -m labs.doctor_trial`, healthy patients seen five times, on a quiet machine."""
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50)


def shares(run: Records, guess: Prediction | None = None) -> None:
    """How many visits ended right, of the sick and of the healthy, with intervals; `guess`: % accused."""
    places, accused = run.where("place"), run.where("accused")
    rows = {
        "ill: named first or second": [1 <= r.value <= 2 for r in places],
        "ill: named first": [r.value == 1 for r in places],
        "healthy: accused": [bool(r.value) for r in accused],
    }
    of = {name: trial.share(run, right) for name, right in rows.items() if right}
    percent = {name: Estimate(100 * e.value, 100 * e.low, 100 * e.high, e.n, "%") for name, e in of.items()}
    message = (
        f"Named first or second: {sum(1 <= r.value <= 2 for r in places)} of {len(places)} illnesses. "
        f"Accused: {sum(bool(r.value) for r in accused)} of {len(accused)} healthy visits"
    )
    fig, ax = figure(
        message,
        xlabel="share of visits (%)",
        ylabel="visits",
        records=run.where("visit_s"),
        size=(7.4, 2.9),
        legend_below=True,
    )
    bars(ax, list(percent), percent.values(), kind=run[0].kind, label="share")
    if guess is not None and "healthy: accused" in percent:
        prediction(ax, float(guess), list(percent).index("healthy: accused"))
    ax.set_xlim(-3, 103)
    told = "; ".join(f"{name} {e}" for name, e in percent.items())
    show(fig, alt=f"{message}. Shares with their intervals: {told}. {_words(run)}")
    if guess is not None and "healthy: accused" in percent:
        say(f"* {guess.against(percent['healthy: accused'], run[0].kind)}")
    say("\n".join(f"* {line}" for line in list(trial.answer(run))[:5]))


def _words(run: Records) -> str:
    missed = sorted({r.case["patient"] for r in run.where("place") if not 1 <= r.value <= 2})
    accused = sorted({r.case["patient"] for r in run.where("accused") if r.value})
    return f"Not always named: {', '.join(missed) or 'none'}. Accused at least once: {', '.join(accused) or 'none'}."


def bounds_against_gains(run: Records) -> None:
    """A point for each cure: what was promised at most, and what it gave in turn, with both intervals."""
    found = trial.promises(run)
    if not found:
        say("No cure of a patient that was given a bound has been measured.")
        return
    kept, more = [p for p in found if p.kept], [p for p in found if p.exceeded]
    message = (
        f"Of {len(found)} gains {len(more) or 'none'} {'are' if len(more) > 1 else 'is'} surely more than "
        f"promised at most; {len(kept)} are near it ({100 * trial.NEAR:.0f} %, or their interval)"
    )
    fig, ax = figure(
        message,
        xlabel="measured gain of the cure (x)",
        ylabel="promised at most (x)",
        records=Records([*run.where("bound"), *run.where("gain")]),
        size=(6.8, 4.6),
    )
    most = max(max(p.bound.high, p.gain.high) for p in found)
    ticks = [t for t in TICKS if t <= 1.4 * most]
    log_axes(ax, ticks, ticks)
    ax.fill_between(
        [0.8, 2 * most],
        [0.8 * (1 - trial.NEAR), 2 * most * (1 - trial.NEAR)],
        [0.8 * (1 + trial.NEAR), 2 * most * (1 + trial.NEAR)],
        color="#E3E3E3",
        linewidth=0,
    )
    ax.plot([0.8, 2 * most], [0.8, 2 * most], color=GREY, linewidth=1)
    points(ax, [p.gain.value for p in found], [p.bound for p in found], kind=run[0].kind, label="a cure")
    ax.errorbar(
        [p.gain.value for p in found],
        [p.bound.value for p in found],
        fmt="none",
        ecolor=GREY,
        elinewidth=1,
        xerr=[
            [max(0.0, p.gain.value - p.gain.low) for p in found],
            [max(0.0, p.gain.high - p.gain.value) for p in found],
        ],
    )
    ax.set_xlim(0.85, 5 * most)
    ax.set_ylim(0.85, 1.4 * most)
    apart = [p for p in found if not p.kept or p.exceeded]
    names = {p.patient.replace("_", " "): (p.gain.value, p.bound.value) for p in apart}
    name_points(ax, names, x=1.5 * most, step=1.25)
    told = "; ".join(f"{p.patient} {p.bound.value:.2f} promised, {p.gain.value:.2f} given" for p in found)
    show(fig, alt=f"{message}. Promised against measured gains on logarithmic axes, with the diagonal: {told}.")
