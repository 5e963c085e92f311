"""Figures of notebook 12: whom the doctor accused of what, and what it promised against what the cures gave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from labs import doctor_trial as trial
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate
from labs.kit.plot import GREY, bars, figure, log_axes, name_points, points, prediction, show
from labs.kit.record import Records
from labs.parts.doctor.cases import BY_NAME

RECORDED = Path(__file__).parents[3] / "records" / "amd-epyc-2-cores-2026-11" / "doctor_trial.jsonl"
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


HEALTHY, NOTHING = "healthy", "nothing"


def confusion(run: Records) -> None:
    """Illnesses, and all healthy patients in one row, against what was said first: how many visits."""
    from matplotlib.patches import Rectangle

    from labs.kit.plot import heat_map

    table, patients = _by_illness(run), Counter(_illness(n) for n in trial.matrix(run))
    rows = sorted(table, key=lambda name: (name == HEALTHY, list(BY_NAME).index(_first_patient(name))))
    order = [s for s in [*rows[:-1], NOTHING] if any(s in c for c in table.values())]
    said = [*order, *sorted({s for c in table.values() for s in c} - set(order))]
    counts = [[table[row][s] for s in said] for row in rows]
    wrong = [(row, s) for row in rows for s in said if table[row][s] and not _right(row, s)]
    total, off = sum(c.total() for c in table.values()), sum(table[row][s] for row, s in wrong)
    message = f"What the doctor says first is right in {total - off} of {total} visits"
    fig, ax = figure(
        message,
        xlabel="said first",
        ylabel="patients (how many)",
        records=run.where("visit_s"),
        size=(3.2 + 0.3 * len(said), 2.5 + 0.24 * len(rows)),
    )
    shares_of = [[100 * n / table[row].total() for n in cells] for row, cells in zip(rows, counts, strict=True)]
    heat_map(
        ax,
        shares_of,
        columns=[s.replace("_", " ") for s in said],
        form="{:.0f}",
        kind=run[0].kind,
        rows=[f"{row.replace('_', ' ')} ({patients[row]})" for row in rows],
        label="number of visits; colour: share of its row",
    )
    for text in ax.texts:  # never said: an empty cell is easier to read than a zero
        j, i = map(round, text.get_position())
        text.set_text(str(counts[i][j] or ""))
    for row, s in wrong:
        ax.add_patch(
            Rectangle(
                (said.index(s) - 0.5, rows.index(row) - 0.5),
                1,
                1,
                fill=False,
                linewidth=2.5,
                edgecolor="#D55E00",
                zorder=3,
            )
        )
    ax.tick_params(axis="x", rotation=90)
    told = ", ".join(f"{row} as {s} ({table[row][s]})" for row, s in wrong) or "none"
    show(fig, alt=f"{message}. Illnesses against what was said first. Wrong, framed: {told}.")


def _illness(patient: str) -> str:
    case = BY_NAME[patient]
    return case.names[0] if case.is_ill else HEALTHY


def _first_patient(illness: str) -> str:
    return next(name for name in BY_NAME if _illness(name) == illness)


def _right(illness: str, said: str) -> bool:
    if illness == HEALTHY:
        return said == NOTHING
    return any(said in case.names for name, case in BY_NAME.items() if _illness(name) == illness)


def _by_illness(run: Records) -> dict[str, Counter[str]]:
    table: dict[str, Counter[str]] = {}
    for patient, said in trial.matrix(run).items():
        table.setdefault(_illness(patient), Counter()).update(said)
    return table


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
