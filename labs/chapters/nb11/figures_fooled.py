"""Notebook 11's figure and table of twelve ways to fool oneself: what is told, what is so, and what prevents it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labs import fooled as lab
from labs.fooled.ways import WAYS
from labs.kit.check import Prediction
from labs.kit.claims import claims
from labs.kit.display import say
from labs.kit.measure import Estimate, differs, fewest
from labs.kit.plot import BLUE, GREY, KIND_STYLE, VERMILION, bars, figure, plain_number, prediction, show
from labs.kit.record import Records

APART = 0.17
"""Of a row, up and down: where the two answers of a way stand."""
EDGE = 64.0
"""Beyond this factor, in either direction, an answer is drawn at the edge of the figure."""
TICKS = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16, 64)
LABELS = ("1/64", "1/16", "1/4", "1/2", "1", "2", "4", "16", "64")
GUESSED = "other_size"
SAME_CODE = ("best_of_many", "blocked", "debug_baseline")
"""Ways in which an answer may lie on either side of the truth, which is 1. A single pair's factor never is below."""


def overview(run: Records, guess: Prediction | None = None) -> None:
    """Figure: for each way the fooling and the honest answer over the truth. `guess`: of the rate of another size."""
    found = {r.way.key: r for r in lab.rows(run)}
    here = [r for r in found.values() if r.kinds[0] != "modelled"]
    much = sum(r.fools_much for r in here)
    message = f"{much} of {len(here)} ways that were measured here fool by more than 5 %"
    if worst := max((r for r in here if r.fools), key=lambda r: r.factor, default=None):
        message += f", one by a factor of {_factor(worst)}"
    if max((r.gap.n for r in here), default=0) < fewest():
        message = "Each way was followed too seldom to tell how much it fools"
    names = [f"{title}  {k:2}" for k, title in enumerate((way.title for way in WAYS.values()), start=1)]
    fig, ax = figure(
        message,
        xlabel="answer / truth (logarithmic)",
        ylabel="way to measure",
        size=(7.6, 5.6),
        records=run,
        legend_below=True,
    )
    for what, index, color in (("honest", 1, BLUE), ("fooling", 0, VERMILION)):
        answers = {key: (r.fooled, r.honest)[index] for key, r in found.items()}
        for kind in KIND_STYLE:
            these = {key: a for key, a in answers.items() if found[key].kinds[index] == kind and _inside(a)}
            before = len(ax.containers)
            bars(ax, names, map(these.get, WAYS), kind=kind, label=f"{what} answer", color=color)
            _shift(ax.containers[before:], APART if index == 0 else -APART)
    _numbers(ax, found, lab.left_out(run))
    ax.axvline(1, color="black", linewidth=1, zorder=1)
    ax.set_xscale("log", base=2)
    ax.set_xticks(TICKS, LABELS)
    ax.set_xlim(1 / EDGE / 1.3, EDGE * 1.3)
    if guess is not None and 1 / EDGE < guess < EDGE:
        prediction(ax, float(guess), list(WAYS).index(GUESSED))
    told = "; ".join(f"{r.way.title} {_number(r.fooled.value)}" for r in found.values())
    show(fig, alt=f"{message}. Twelve rows, each with a fooling answer over the truth beside an honest one: {told}.")
    say("\n".join(f"* {line}" for line in sentences(run, guess)))


def _shift(marks: Sequence[Any], rows: float) -> None:
    """Move marks and their intervals down by a part of a row: none hides another."""
    for mark, caps, intervals in marks:
        for line in (mark, *caps):
            line.set_ydata([y + rows for y in line.get_ydata()])
        for collection in intervals:
            collection.set_segments([[(x, y + rows) for x, y in segment] for segment in collection.get_segments()])


def _numbers(ax, found: dict[str, lab.Row], left_out: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """The fooling answer as a number beside its row; marks that lie outside, at the edge; why a row is empty."""
    beside = ax.get_yaxis_transform()
    look = {"va": "center", "fontsize": 10}
    ax.text(1.02, -1, "fooling\nanswer", transform=beside, color=VERMILION, **look)
    for k, key in enumerate(WAYS):
        if key in left_out:
            ax.text(1.15, k, left_out[key], color=GREY, **look)
        if key not in found:
            continue
        value, kind = found[key].fooled.value, found[key].kinds[0]
        ax.text(1.02, k, f"{_number(value)} x", transform=beside, color=VERMILION, **look)
        if not _inside(found[key].fooled):
            edge, mark, side, shift = (EDGE, ">", "right", -9) if value > 1 else (1 / EDGE, "<", "left", 9)
            ax.plot([edge], [k], mark, color=VERMILION, markersize=9, gid=f"kind:{kind}")
            ax.annotate(
                f"beyond ({KIND_STYLE[kind].word})",
                (edge, k),
                xytext=(shift, 0),
                textcoords="offset points",
                ha=side,
                color=VERMILION,
                **look,
            )


def _inside(ratio: Estimate) -> bool:
    return 1 / EDGE <= ratio.value <= EDGE


def _factor(row: lab.Row) -> str:
    """By how much it fools, in either direction, with the interval."""
    ends = (row.gap.low, row.gap.high) if row.gap.value >= 1 else (1 / row.gap.high, 1 / row.gap.low)
    return f"{_number(row.factor)} [{_number(ends[0])}, {_number(ends[1])}]"


def _number(ratio: float) -> str:
    """Two digits, three where two would hide a small difference; far below 1 as a fraction."""
    if ratio < 0.1:
        return f"1/{_number(1 / ratio)}"
    return plain_number(float(f"{ratio:.{3 if 0.5 < ratio < 2 else 2}g}"))


def sentences(run: Records, guess: Prediction | None = None) -> list[str]:
    """What the learner's prediction met, how both kinds of answer did where the truth is known, and single cases."""
    found = {r.way.key: r for r in lab.rows(run)}
    said = []
    if guess is not None:
        row = found.get(GUESSED)
        met = guess.against(row.gap, row.kinds[0]) if row else "Nothing to hold it against: it takes two ranks."
        said.append(f"{WAYS[GUESSED].title.capitalize()}: {met}")
    known = [found[key] for key in SAME_CODE if key in found]
    if known:
        right = [sum(not differs(of(r)) for r in known) for of in (lambda r: r.honest, lambda r: r.fooled)]
        which = ", ".join(r.way.title for r in known)
        said.append(
            f"Where the same code is held against itself ({which}), the interval of the honest answer holds 1 "
            f"in {right[0]} of {len(known)} rows, that of the fooling answer in {right[1]}."
        )
    if "single_pair" in found:
        share = lab.unsteady_pairs(run).scaled(100, "%")
        said.append(
            f"Of single pairs of runs of the same code, {share} differ by more than 5 %. Such a factor is "
            "taken as 1 or more, so its honest value lies above 1."
        )
    said += [*_padding(found), *_learning(run, found), *_busy(found)]
    little = [r.way.title for r in found.values() if r.fools and not r.fools_much]
    unclear = [r.way.title for r in found.values() if not r.fools]
    said += [f"Shown to fool, but not shown to do so by more than 5 %: {', '.join(little)}."] * bool(little)
    return said + [f"No difference that this run can show: {', '.join(unclear)}."] * bool(unclear)


def _padding(found: dict[str, lab.Row]) -> list[str]:
    """Which way the count with padding points, and which way the words do."""
    if "two_units" not in found:
        return []
    row = found["two_units"]
    words = f"in words per second {row.said}, {_shown(row.said)}"
    return [
        f"Sentences sorted by length need less padding. In tokens per second, padding counted, training runs "
        f"{row.told} as fast, which is {_shown(row.told)}; {words}."
    ]


def _shown(gain: Estimate) -> str:
    """What this run can say of a speed-up."""
    if gain.n < fewest() or not differs(gain):
        return "no difference that this run can show"
    return "a gain" if gain.value > 1 else "a loss"


def _learning(run: Records, found: dict[str, lab.Row]) -> list[str]:
    """Samples per second and the time to a loss, as far as this run can tell them apart from no change."""
    if "samples_rate" not in found:
        return []
    row, case = found["samples_rate"], run.one("honest", way="samples_rate").case
    if row.said.n < fewest() or not differs(row.said):
        learnt = f"whether the loss is reached sooner cannot be told ({row.said})"
    else:
        learnt = f"the loss is reached {'sooner' if row.said.value > 1 else 'later'}: {row.said} as fast"
    rates = " and ".join(
        f"{rate:g} (batch {batch})" for batch, rate in zip(case["batches"], case["learning_rates"], strict=True)
    )
    how = "searched here for each, with other seeds" if case["searched"] else "not searched in this short run"
    return [
        f"A batch {lab.LARGER} times as large trains {row.told} as many samples per second; {learnt}. "
        f"Learning rates: {rates}, {how}."
    ]


def _busy(found: dict[str, lab.Row]) -> list[str]:
    """What the counter shows, and what the same seconds were worth."""
    if "busy_as_useful" not in found:
        return []
    row = found["busy_as_useful"]
    return [
        f"Training with small batches, the device is busy for {row.told_text} of the time, and reaches "
        f"{row.said_text} of the FLOP/s of a product of large matrices."
    ]


def table(run: Records) -> None:
    """Each way with both answers, the line of an article that does it, and what prevents it in this course."""
    found, known = {r.way.key: r for r in lab.rows(run)}, {c.id: c for c in claims()}
    lines = ["| | way | told | honestly | an article | prevented by |", "| --- | --- | --- | --- | --- | --- |"]
    for k, (key, way) in enumerate(WAYS.items(), start=1):
        row, why = found.get(key), lab.left_out(run).get(key, "not asked for")
        told, said = (row.told_text, row.said_text) if row else (why, "")
        article = f"{way.does} ({way.claim}: {known[way.claim].source})" if way.claim else "none of the five"
        lines.append(f"| {k} | **{way.title}**: {way.quantity} | {told} | {said} | {article} | {way.prevents} |")
    say("\n".join(lines))
    stated = [f"* **{way.claim}**: {known[way.claim].claim}" for way in WAYS.values() if way.claim]
    say("\n".join(stated), folded="What these lines of the articles state")
