"""Figures and sentences of notebook 09 on the clinic: what each measurement shows, what cures give, scores."""

from __future__ import annotations

import statistics
from itertools import islice
from pathlib import Path

import pandas

from labs import clinic
from labs.kit import measure
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import BLUE, ORANGE, bars, choice_map, figure, show
from labs.kit.record import Records, load
from labs.parts.clinic.illnesses import BY_NAME, ILLNESSES, WELL, draw
from labs.parts.clinic.measurements import MEASUREMENTS

NAMED, OTHER, NOTHING = "names it", "looks ill, names something else or nothing", "looks healthy"
EXAMINATION = Path(__file__).parents[3] / "records" / "amd-epyc-2-cores-2026-11" / "clinic_examination.jsonl"
"""What `python -m labs.clinic --examine 5` saved; without single findings and prices."""
LONGER_TURNS = EXAMINATION.with_name("clinic_fsync.jsonl")
"""What `python -m labs.clinic --examine 5 --kinds fsync --seconds 20` saved: a small gain needs more rounds."""
COLORS = {NAMED: BLUE, OTHER: "#F3D9C9", NOTHING: "#E3E3E3"}


def examination() -> Records:
    """Five of each patient, all measurements, all cures: recorded, since it takes a quarter of an hour and quiet."""
    return load(EXAMINATION)


def _kind(run: Records) -> str:
    return "recorded" if any(r.kind == "recorded" for r in run) else "measured"


def level(run: Records, patient: str, measurement: str) -> str:
    """What one measurement alone tells about a patient in most of the seeds."""
    told = []
    for r in run.where("signs", patient=patient, measure=measurement):
        named = r.case["says"] == patient
        told.append(NAMED if named and BY_NAME[patient] in ILLNESSES else OTHER if r.case["read"] else NOTHING)
    return statistics.mode(told)


def naming(run: Records) -> float:
    """How many measurements name an illness each by itself: the median over illnesses; 0 if nobody is ill."""
    ill = [i.name for i in ILLNESSES if run.where("signs", patient=i.name)]
    return statistics.median(sum(level(run, i, m) == NAMED for m in MEASUREMENTS) for i in ill) if ill else 0


def matrix(run: Records) -> None:
    """Which measurement shows which illness: a cell for each, from an examination of all patients."""
    names = [i.name for i in ILLNESSES + WELL if run.where("signs", patient=i.name)]
    cells = [[level(run, name, m) for m in MEASUREMENTS] for name in names]
    ill = [(name, row) for name, row in zip(names, cells, strict=True) if BY_NAME[name] in ILLNESSES]
    few = naming(run)
    message = f"Most illnesses are named by {few:g} of {len(MEASUREMENTS)} measurements: ask for the right one"
    fig, ax = figure(message, xlabel="measurement", ylabel="patient", records=run, size=(8.4, 1.9 + 0.27 * len(names)))
    choice_map(
        ax, cells, columns=list(MEASUREMENTS), rows=[n.replace("_", " ") for n in names], colors=COLORS, kind=_kind(run)
    )
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(MEASUREMENTS)), [m.replace("_", "\n") for m in MEASUREMENTS], fontsize=9)
    told = "; ".join(
        f"{name}: {', '.join(m for m, c in zip(MEASUREMENTS, row, strict=True) if c == NAMED) or 'none'}"
        for name, row in ill
    )
    show(fig, alt=f"{message}. Table of patients against measurements. Each illness and what names it: {told}.")


def before_and_after(run: Records) -> None:
    """The gain of each cure with its interval, beside what the measurements promised."""
    names = [i.name for i in ILLNESSES + WELL if run.where("gain", patient=i.name)]
    gains = {n: _middle([measure.estimate(r.samples, "x") for r in run.where("gain", patient=n)]) for n in names}
    names.sort(key=lambda n: -gains[n].value)
    promised = {
        n: statistics.median(r.value for r in rows) if (rows := run.where("promised", patient=n)) else None
        for n in names
    }
    top = names[0]
    message = f"Cures of one line: {top.replace('_', ' ')} is worth the most, {gains[top].value:.1f} times the speed"
    fig, ax = figure(
        message,
        xlabel="speed with the cure / without (x)",
        ylabel="patient",
        records=run,
        size=(7.6, 1.9 + 0.27 * len(names)),
        legend_below=True,
    )
    rows = [n.replace("_", " ") for n in names]
    bars(ax, rows, [promised[n] for n in names], kind="modelled", label="promised by the measurements", color=ORANGE)
    for line in ax.lines[:]:
        line.set(marker="|", markersize=11, markeredgewidth=2.5)
    bars(ax, rows, [gains[n] for n in names], kind=_kind(run), label="cure and illness in turn", color=BLUE)
    ax.axvline(1, color="0.4", linewidth=1)
    ax.set_xscale("log")
    most = max([g.high for g in gains.values()] + [p for p in promised.values() if p])
    ticks = [t for t in (1, 1.5, 2, 3, 5, 10, 20) if t <= 1.3 * most]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    told = "; ".join(f"{n} {gains[n].value:.2f}" for n in names)
    show(fig, alt=f"{message}. Measured gains, as ratios of speeds: {told}.")


def half_given(run: Records, longer: Records) -> None:
    """How many cures gave at least half of their promise; `longer`: more rounds of those that cannot tell."""
    ill = {i.name for i in ILLNESSES}
    lines = [line for line in clinic.cures(run) if line.partition(":")[0] in ill]
    enough = [line for line in lines if line.endswith("at least half of it")]
    say(
        "\n".join(
            [f"* {len(enough)} of {len(lines)} cures gave at least half of what was promised."]
            + [f"* {line}." for line in lines if line not in enough]
            + [f"* With eight times as long turns: {line}." for line in clinic.cures(longer)]
        )
    )


def longer_turns() -> Records:
    """Five patients of the one kind whose gain is too small for the examination: recorded."""
    return load(LONGER_TURNS)


def _middle(found: list[measure.Estimate]) -> measure.Estimate:
    return sorted(found, key=lambda e: e.value)[len(found) // 2]


def told(run: Records, guess: Prediction | None = None) -> None:
    """The sentences of an examination; those on single cures are in the figure. `guess`: see `naming`."""
    lines = list(islice(clinic.examined(run), 4))
    if guess is not None and guess == guess:
        lines.insert(0, f"You predicted {float(guess):g} of {len(MEASUREMENTS)}; it is {naming(run):g}.")
    say("\n".join(f"* {line}" for line in lines))


def beside(patients: dict[str, Records]) -> None:
    """Shares of a step of several patients, a column for each: what has grown shows beside one who is well."""
    columns = {
        name: {r.case["what"]: 100 * r.value for r in run.where("finding", measure="shares")}
        for name, run in patients.items()
    }
    table = pandas.DataFrame(columns).map(lambda percent: f"{percent:.0f} %")
    table.columns.name = "share of a step"
    show_table(table)


def promise(run: Records, found: clinic.Verdict, share: str) -> None:
    """What 1 / (1 - share) had promised, beside what the cure gave."""
    size = run.one("finding", measure="shares", what=share).value
    promised, gain = clinic.predict(size), found.gain
    if gain is None:
        say(f"* Nothing was put back, so there is nothing to compare with {share}.")
        return
    apart = "less than that" if gain.high < promised else "more than that"
    if gain.low <= promised <= gain.high:
        apart = "a difference cannot be told"
    say(
        f"* {share.capitalize()} was {100 * size:.0f} % of a step: had only that gone, 1 / (1 - {size:.2f}) = "
        f"{promised:.2f}x. The cure gave {gain.value:.2f}x [{gain.low:.2f}, {gain.high:.2f}]: {apart}."
    )


def scores(found: list[clinic.Verdict]) -> None:
    """Points of the learner's patients, with what was bought for each."""
    if not found:
        say("No patient has been diagnosed yet.")
        return
    total = sum(v.score for v in found)
    message = f"{total} points for {len(found)} patient{'s' if len(found) != 1 else ''}"
    fig, ax = figure(
        message,
        xlabel=f"points (of {clinic.CAUSE + clinic.GAIN})",
        ylabel="patient",
        records=_as_records(found),
        size=(7.0, 1.9 + 0.4 * len(found)),
        legend_below=True,
    )
    rows = [f"{v.seed}: {draw(v.seed).name.replace('_', ' ') if v.right else '?'}" for v in found]
    bars(ax, rows, [v.score for v in found])
    ax.set_xlim(-3, clinic.CAUSE + clinic.GAIN + 3)
    show(fig, alt=f"{message}: " + "; ".join(f"patient {v.seed} {v.score}" for v in found) + ".")
    say("\n".join(f"* Patient {v.seed}: {v}" for v in found))


def _as_records(found: list[clinic.Verdict]) -> Records:
    from labs.kit.record import Record, attach_provenance

    return Records(attach_provenance([Record("clinic", "score", "points", (v.score,)) for v in found]))
