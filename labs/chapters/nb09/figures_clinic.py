"""Figures and sentences of notebook 09 on the clinic: what each measurement shows, what cures give, scores."""

from __future__ import annotations

import pandas

from labs import clinic
from labs.clinic.illnesses import draw
from labs.kit.display import say, show_table
from labs.kit.plot import bars, figure, show
from labs.kit.record import Records


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
