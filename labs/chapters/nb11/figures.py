"""Figures of notebook 11: votes beside verdicts, and verdicts by article."""

from __future__ import annotations

from collections import Counter

from labs.chapters.nb11 import vote
from labs.chapters.nb11.vote import EVERYTHING_50, Votes
from labs.kit.check import Prediction
from labs.kit.claims import SIGNS, articles, claims
from labs.kit.display import say
from labs.kit.docket import NEEDS, Docket, kind_of, recorded_case
from labs.kit.plot import GREY, SERIES, figure, points, show, spans
from labs.kit.record import Records

WORDS = ("holds", "depends", "does not hold", NEEDS)
COLORS = dict(zip(WORDS, (SERIES[2], SERIES[5], SERIES[1], "#BBBBBB"), strict=True))
HATCH = {"holds": "", "depends": "//", "does not hold": "xx", NEEDS: ".."}  # not by colour alone


def evidence_of(docket: Docket) -> Records:
    """A record of each recorded run that these verdicts rest on: for the line under a figure."""
    cases = (recorded_case(c)[1] for c, _ in docket.rows)
    found = {id(e): e for e in cases if e}.values()
    return Records(next(r for r in e if r.provenance) for e in found)


def votes_figure(votes: Votes, docket: Docket) -> None:
    """Each vote beside what the trial found, the largest surprise first, and the score."""
    rows = votes.judged(docket)
    if not rows:
        return say("None of the claims that you voted on has a verdict here.")
    rows.sort(key=lambda row: -abs(row[1] - 100 * (row[2].word == "holds")))
    score, held = votes.brier(docket), sum(v.word == "holds" for *_, v in rows)
    message = f"{held} of {len(rows)} statements hold as they are written; your Brier score is {score:.2f}"
    fig, ax = figure(
        message,
        xlabel="how sure that it holds (%)",
        ylabel="claim",
        records=evidence_of(docket),
        size=(7.0, 1.9 + 0.27 * len(rows)),
        legend_below=True,
    )
    for i, (_, sure, v) in enumerate(rows):
        ax.plot([sure, 100 * (v.word == "holds")], [i, i], color=GREY, linewidth=1, zorder=1)
    for word in SIGNS:
        of = [i for i, (*_, v) in enumerate(rows) if v.word == word]
        if of:
            points(
                ax,
                [100 * (word == "holds")] * len(of),
                of,
                kind="recorded",
                color=COLORS[word],
                label=word if word == "holds" else f"{word}, counts as 0",
            )
    points(ax, [sure for _, sure, _ in rows], range(len(rows)), kind="prediction", label="")
    ax.set_yticks(range(len(rows)), [c.id for c, *_ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(-4, 104)
    told = "; ".join(f"{c.id} {sure:.0f} %, {v.word}" for c, sure, v in rows)
    show(fig, alt=f"{message}. Votes and verdicts: {told}.")
    base = held / len(rows)
    lines = [
        f"Your Brier score is {score:.2f} (0 is perfect). Saying 50 % to everything gets {EVERYTHING_50}; saying "
        f"{100 * base:.0f} % to everything, the share that holds, gets {base * (1 - base):.2f}, but "
        "that share is known only afterwards.",
        *(line[0].upper() + line[1:] + "." for line in vote.calibration(votes, docket)),
    ]
    say("\n".join(f"* {line}" for line in lines))


def by_article(docket: Docket) -> None:
    """How many claims of each article got which verdict."""
    counts = docket.count(lambda c: c.id[0])
    total = Counter(kind_of(v) for _, v in docket.rows)
    judged = sum(total[word] for word in SIGNS)
    message = f"{total['holds']} of {judged} statements with a verdict hold as they are written"
    fig, ax = figure(
        message, xlabel="claims", ylabel="article", records=evidence_of(docket), size=(7.4, 3.3), legend_below=True
    )
    stacked(ax, counts)
    ax.set_yticks(range(len(counts)), list(counts))
    told = "; ".join(f"{a}: " + ", ".join(f"{n[w]} {w}" for w in WORDS if n[w]) for a, n in counts.items())
    show(fig, alt=f"{message}. By article: {told}.")


def holding_text(docket: Docket, guess: Prediction) -> None:
    """What became of the guess how many hold, and which article has the largest share of them."""
    kinds = Counter(v.kind for _, v in docket.rows if v.word in SIGNS)
    lines = [
        guess.against(sum(v.word == "holds" for _, v in docket.rows), "found"),
        f"{kinds['recorded']} of {kinds.total()} verdicts rest on records of runs, {kinds['modelled']} on formulas, "
        f"{kinds['published']} on documents and published tables, {kinds['']} on what the software says of itself.",
    ]
    for key, n in docket.count(lambda c: c.id[0]).items():
        judged = sum(n[word] for word in SIGNS)
        lines.append(f"{key}: {n['holds']} of {judged} with a verdict hold, {100 * n['holds'] / judged:.0f} %.")
    say("\n".join(f"* {line}" for line in lines))


def stacked(ax, counts: dict[str, Counter[str]]) -> None:  # type: ignore[no-untyped-def]
    """One row for each group, one part for each verdict, with its number."""
    for row, found in enumerate(counts.values()):
        start = 0
        for word in WORDS:
            if found[word]:
                spans(ax, row, [(start, start + found[word])], kind="recorded", color=COLORS[word], hatch=HATCH[word])
                ax.text(
                    start + found[word] / 2,
                    row,
                    str(found[word]),
                    ha="center",
                    va="center",
                    fontsize=11,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
                )
            start += found[word]
    for word in WORDS:  # a legend of all, in the order of the parts
        if any(found[word] for found in counts.values()):
            spans(ax, -9, [(0, 0)], kind="recorded", color=COLORS[word], hatch=HATCH[word])
            ax.collections[-1].set_label(word)  # without "(recorded)": some rest on documents
    ax.set_ylim(len(counts) - 0.5, -0.5)


def article_list() -> None:
    """The five sources."""
    lines = []
    for key, a in articles().items():
        when = a.date[:4] if a.date[0].isdigit() else a.date
        lines.append(f"* **{key}**: *{a.title_en}*, {when}: {sum(c.id[0] == key for c in claims())} claims")
    say("\n".join(lines))
