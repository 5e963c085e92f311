"""Figures of notebook 11: votes beside verdicts, verdicts by article, reading against the trial."""

from __future__ import annotations

import math
from collections import Counter

import pandas

from labs.chapters.nb11 import vote
from labs.chapters.nb11.vote import EVERYTHING_50, Votes
from labs.kit.check import Prediction
from labs.kit.claims import PAPER, SIGNS, articles, claims
from labs.kit.display import say, show_table
from labs.kit.docket import NEEDS, Docket, kind_of, recorded_case
from labs.kit.plot import GREY, SERIES, figure, heat_map, points, show, spans
from labs.kit.record import Records

WORDS = ("holds", "depends", "does not hold", NEEDS)
COLORS = dict(zip(WORDS, (SERIES[2], SERIES[5], SERIES[1], "#BBBBBB"), strict=True))
HATCH = {"holds": "", "depends": "//", "does not hold": "xx", NEEDS: ".."}  # not by colour alone

OWN = "11"


def evidence_of(docket: Docket) -> Records:
    """A record of each recorded run that these verdicts rest on: for the line under a figure.

    Without this notebook's own, which comes from the run that draws the figure: the line would tell of the run before.
    """
    cases = (recorded_case(c)[1] for c, _ in docket.rows if c.notebook != OWN)
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
        f"What documentation and arithmetic say of the same claims before any run (section 2) gets "
        f"{vote.of_reading(docket, votes.sure):.2f}; over all claims {vote.of_reading(docket):.2f}.",
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


def own_text(mine: Docket, docket: Docket) -> None:
    """Of the claims whose notebooks have been run here: how many verdicts are as recorded, and which are not."""
    if not mine.rows:
        return say(
            "No notebook with claims has been run to its end here yet: the verdicts above are the recorded ones."
        )
    notebooks = ", ".join(sorted({c.notebook for c, _ in mine.rows}))
    other = [(c, v, docket.verdict(c.id)) for c, v in mine.rows if v.word != docket.verdict(c.id).word]
    lines = [
        f"Of {len(mine.rows)} claims (notebooks {notebooks}), {len(mine.rows) - len(other)} have the verdict that "
        f"was recorded."
    ]
    lines += [f"**{c.id}**: {v.word} here, {then.word} as recorded. Here: {v.because}" for c, v, then in other]
    return say("\n".join(f"* {line}" for line in lines))


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


EXPECTED = {"true": "holds", "true with conditions": "depends", "outdated": "does not hold", "wrong": "does not hold"}
"""What the trial finds if reading was right."""


def reading_against_trial(docket: Docket, guess: Prediction) -> None:
    """What reading said, against what the trial found; `guess`: % of the verdicts that it foresaw."""
    counts = docket.count(lambda c: c.paper)
    rows, columns = [p for p in PAPER if p in counts], [w for w in WORDS if any(n[w] for n in counts.values())]
    judged = [(c, v) for c, v in docket.rows if v.word in SIGNS]
    same = sum(EXPECTED[c.paper] == v.word for c, v in judged)
    message = f"Reading alone foresaw {same} of {len(judged)} verdicts"
    fig, ax = figure(message, xlabel="the trial", ylabel="reading alone", records=evidence_of(docket), size=(6.8, 3.5))
    heat_map(
        ax,
        [[counts[p][w] or math.nan for w in columns] for p in rows],
        rows=rows,
        columns=[word.replace(" ", "\n", 1) for word in columns],
        kind="recorded",
        form="{:.0f}",
        label="number of claims",
    )
    told = "; ".join(f"{p}: " + ", ".join(f"{counts[p][w]} {w}" for w in columns if counts[p][w]) for p in rows)
    show(fig, alt=f"{message}. Claims by what reading said: {told}.")
    say(f"* {guess.against(100 * same / len(judged), 'found')}")


def surprises(docket: Docket) -> None:
    """Where reading and the trial contradict each other outright."""
    rows = [(c, v) for c, v in docket.rows if {EXPECTED[c.paper], v.word} == {"holds", "does not hold"}]
    if not rows:
        return say(
            "Reading and trial never say the opposite of each other: no claim is true to one and refuted by the other."
        )
    say(
        "Where one says that it holds and the other that it does not:\n\n"
        + "\n".join(f"* **{c.id}**, {c.claim} Reading: {c.paper}; trial: {v.word}. {v.because}" for c, v in rows)
    )


def need_gpus(docket: Docket) -> None:
    """What only GPUs decide, and the command that will."""
    rows = [(c, v) for c, v in docket.rows if kind_of(v) == NEEDS]
    if not rows:
        return say("No claim needs a GPU that is not here.")
    show_table(
        pandas.DataFrame(
            [{"claim": f"{c.id}: {c.claim}", "needs": v.word[6:], "decided by": c.command} for c, v in rows]
        ).set_index("claim")
    )
