"""Figures of notebook 12: whom the doctor accused of what, and what it promised against what the cures gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from labs import doctor_trial as trial
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import BLUE, GREY, choice_map, figure, log_axes, points, show
from labs.kit.record import Records
from labs.parts.doctor.cases import BY_NAME

RECORDED = Path(__file__).parents[3] / "records" / "amd-epyc-2-cores-2026-11" / "doctor_trial.jsonl"
"""`python -m labs.doctor_trial --healthy-runs 5`, on a quiet machine."""
FIRST, SECOND, MISSED = "named first", "named second", "not named"
QUIET, ACCUSED, NOT_SEEN = "healthy, and told so", "healthy, and accused", "not seen"
COLORS = {FIRST: BLUE, SECOND: "#A6CEE8", MISSED: "#D55E00", QUIET: "#E3E3E3", ACCUSED: "#4D4D4D", NOT_SEEN: "#FFFFFF"}
TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50)


def _cells(run: Records, patient: str, runs: int) -> list[str]:
    """How each visit to a patient ended."""
    cells = [NOT_SEEN] * runs
    for r in run.where("place", patient=patient):
        cells[r.case["run"]] = {1: FIRST, 2: SECOND}.get(int(r.value), MISSED)
    for r in run.where("accused", patient=patient):
        cells[r.case["run"]] = ACCUSED if r.value else QUIET
    return cells


def _seen(run: Records, ill: bool) -> list[str]:
    names = {r.case["patient"] for r in run.where("place" if ill else "accused")}
    return [name for name in BY_NAME if name in names]


def visits(run: Records, guess: Prediction | None = None) -> None:
    """A row for each patient, the sick ones first; a column for each visit; the names of what was said, in words."""
    sick, well = _seen(run, True), _seen(run, False)
    runs = 1 + max(r.case["run"] for r in run.where("visit_s"))
    cells = [_cells(run, name, runs) for name in sick + well]
    of = [cell for row in cells for cell in row]
    named, asked = of.count(FIRST) + of.count(SECOND), of.count(FIRST) + of.count(SECOND) + of.count(MISSED)
    message = (f"Named first or second: {named} of {asked} illnesses. "
               f"Accused: {of.count(ACCUSED)} of {of.count(QUIET) + of.count(ACCUSED)} healthy visits")  # fmt: skip
    fig, ax = figure(message, xlabel="visit", ylabel="patient", records=Records(run.where("visit_s")),
                     size=(5.6 + 0.3 * runs, 1.9 + 0.24 * len(cells)), legend_below=True)  # fmt: skip
    rows = [name.replace("_", " ") for name in sick + well]
    used = {name: color for name, color in COLORS.items() if name in of}
    choice_map(ax, cells, columns=range(1, runs + 1), rows=rows, colors=used, kind=run[0].kind)
    wrong = _words(run, sick, well)
    show(fig, alt=f"{message}. Table of patients against visits, coloured by what the doctor said. {wrong}")
    if guess is not None and (well := of.count(QUIET) + of.count(ACCUSED)):
        say(f"* {guess.against(100 * of.count(ACCUSED) / well, run[0].kind)}")
    say("\n".join(f"* {line}" for line in list(trial.answer(run))[:5]))


def _words(run: Records, sick: Sequence[str], well: Sequence[str]) -> str:
    missed = [n for n in sick if any(not 1 <= r.value <= 2 for r in run.where("place", patient=n))]
    accused = [n for n in well if any(r.value for r in run.where("accused", patient=n))]
    return f"Not always named: {', '.join(missed) or 'none'}. Accused at least once: {', '.join(accused) or 'none'}."


def confusion(run: Records) -> None:
    """Patients against what was said first, how often: what the doctor takes for what."""
    from matplotlib.patches import Rectangle

    from labs.kit.plot import heat_map

    table = trial.matrix(run)
    names = [n for ill in (True, False) for n in _seen(run, ill)]
    wanted = {n: BY_NAME[n].names if BY_NAME[n].is_ill else ("nothing",) for n in names}
    order = {s: k for k, s in enumerate(dict.fromkeys(s for n in names for s in wanted[n]))}  # right ones go downwards
    said = sorted({s for c in table.values() for s in c}, key=lambda s: (order.get(s, len(order)), s))
    shares = [[100 * table[n][s] / table[n].total() for s in said] for n in names]
    wrong = [(n, s) for n in names for s in said if table[n][s] and s not in wanted[n]]
    total = sum(c.total() for c in table.values())
    right = total - sum(table[n][s] for n, s in wrong)
    message = f"What the doctor says first is right in {right} of {total} visits"
    fig, ax = figure(message, xlabel="said first", ylabel="patient", records=Records(run.where("visit_s")),
                     size=(3.6 + 0.42 * len(said), 2.6 + 0.24 * len(names)))  # fmt: skip
    heat_map(ax, shares, columns=[s.replace("_", " ") for s in said], rows=[n.replace("_", " ") for n in names],
             kind=run[0].kind, form="{:.0f}", label="share of visits (%)")  # fmt: skip
    for text in ax.texts:  # never said: an empty cell is easier to read than a zero
        text.set_visible(text.get_text() != "0")
    for n, s in wrong:
        ax.add_patch(Rectangle((said.index(s) - 0.5, names.index(n) - 0.5), 1, 1, fill=False, linewidth=2.5,
                               edgecolor="#D55E00", zorder=3))  # fmt: skip
    ax.tick_params(axis="x", rotation=90)
    off = ", ".join(f"{n} as {s}" for n, s in wrong) or "none"
    show(fig, alt=f"{message}. Patients, the sick ones first, against what was said first. Wrong, framed: {off}.")


def bounds_against_gains(run: Records) -> None:
    """A point for each cure: what was promised at most, and what it gave in turn, with both intervals."""
    found = trial.promises(run)
    if not found:
        say("No cure of a patient that was given a bound has been measured.")
        return
    kept, more = [p for p in found if p.kept], [p for p in found if p.exceeded]
    message = (f"{len(kept)} of {len(found)} bounds are within their interval or {100 * trial.NEAR:.0f} % of the gain; "
               f"{len(more) or 'no'} gain{'s are' if len(more) > 1 else ' is'} surely more than promised")  # fmt: skip
    fig, ax = figure(message, xlabel="measured gain of the cure (x)", ylabel="promised at most (x)",
                     records=Records([*run.where("bound"), *run.where("gain")]), size=(6.8, 4.6))  # fmt: skip
    most = max(max(p.bound.high, p.gain.high) for p in found)
    ticks = [t for t in TICKS if t <= 1.4 * most]
    log_axes(ax, ticks, ticks)
    ax.fill_between([0.8, 2 * most], [0.8 * (1 - trial.NEAR), 2 * most * (1 - trial.NEAR)],
                    [0.8 * (1 + trial.NEAR), 2 * most * (1 + trial.NEAR)], color="#E3E3E3", linewidth=0)  # fmt: skip
    ax.plot([0.8, 2 * most], [0.8, 2 * most], color=GREY, linewidth=1)
    points(ax, [p.gain.value for p in found], [p.bound for p in found], kind=run[0].kind, label="a cure")
    ax.errorbar([p.gain.value for p in found], [p.bound.value for p in found], fmt="none", ecolor=GREY, elinewidth=1,
                xerr=[[max(0.0, p.gain.value - p.gain.low) for p in found],
                      [max(0.0, p.gain.high - p.gain.value) for p in found]])  # fmt: skip
    ax.set_xlim(0.85, 1.4 * most)
    ax.set_ylim(0.85, 1.4 * most)
    for p in found:
        if not p.kept or p.exceeded:
            ax.annotate(p.patient.replace("_", " "), (p.gain.value, p.bound.value), xytext=(6, 4), fontsize=9,
                        textcoords="offset points")  # fmt: skip
    told = "; ".join(f"{p.patient} {p.bound.value:.2f} promised, {p.gain.value:.2f} given" for p in found)
    show(fig, alt=f"{message}. Promised against measured gains on logarithmic axes, with the diagonal: {told}.")
