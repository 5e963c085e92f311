"""Figures and tables of notebook 10 on memory: what filled it, what gave it away, and what each cure gives."""

from __future__ import annotations

import re

import pandas

from labs import oom_clinic as lab
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import ORANGE, figure, heat_map, show
from labs.kit.record import Record, Records
from labs.oom_clinic.memory_faults import CURES, TRIM, WHAT

HALF = "half the batch"
SHORT = {
    "batch": "batch too large",
    "states": "parameters + Adam",
    "graph": "kept graph",
    "outputs": "kept outputs",
    "closure": "batch in a closure",
    "python_objects": "Python objects",
    "worker_objects": "objects in workers",
    "worker_buffers": "too many workers",
    "prefetch": "prefetched batches",
    "shared_memory": "/dev/shm too small",
    "address_space": "limit on addresses",
}

TWO_LINES = {
    "checkpointing": "check-\npointing",
    "set_to_none": "set_to_\nnone",
    TRIM: "malloc_\ntrim",
    "prefetch_factor=1": "prefetch_\nfactor=1",
    "4 micro-batches": "4 micro-\nbatches",
}


def cures(run: Records) -> None:
    """Causes against cures: MB that each cure takes off, the darker the larger its share."""
    cells = {cause: row for cause, row in lab.given(run).items() if row}
    columns = [cure for cure in CURES if any(cure in row for row in cells.values())]
    shares = [[_share(row.get(cure)) for cure in columns] for row in cells.values()]
    origin = Records(r for r in run.where("needed_bytes") if r.case["cause"] in cells)
    message = _message({cause: row[HALF] for cause, row in cells.items() if HALF in row})
    note = f"cure ({TRIM}: {lab.INSTEAD})" if TRIM in columns else "cure"
    fig, ax = figure(
        message, xlabel=note, ylabel="what fills the memory", records=origin, size=(9.6, 2.4 + 0.36 * len(cells))
    )
    names = [f"{SHORT[cause]}, {next(iter(row.values())).needed / 1e6:.0f} MB" for cause, row in cells.items()]
    heat_map(
        ax,
        shares,
        columns=columns,
        rows=names,
        kind=origin[0].kind,
        form="",
        center=0.0,
        span=1.0,
        label="MB saved; darker: a larger share; empty: nothing to change",
    )
    for i, row in enumerate(cells.values()):
        for j, cure in enumerate(columns):
            if cure in row:
                dark = abs(_share(row[cure])) > 0.65
                ax.text(j, i, _megabytes(row[cure]), ha="center", va="center", color="white" if dark else "black")
    later = [
        (j, i)
        for i, row in enumerate(cells.values())
        for j, c in enumerate(columns)
        if c in row and lab.is_later(row[c])
    ]
    if later:
        ax.plot(
            *zip(*[(j + 0.36, i - 0.28) for j, i in later], strict=True),
            linestyle="",
            marker="^",
            markersize=6,
            color=ORANGE,
            markeredgecolor="black",
            label="grows on: it runs out later",
        )
        ax.legend(loc="upper right")  # where no cell is
    ax.set_xticks(range(len(columns)), [TWO_LINES.get(c, c.replace(" ", "\n")) for c in columns], fontsize=9)
    told = "; ".join(f"{SHORT[cause]}: {_best(run, cause)}" for cause in cells)
    show(fig, alt=f"{message}. Table of causes against cures. What saves most: {told}.")


def _message(half: dict[str, lab.Given]) -> str:
    """What came of the first thing that everybody tries."""
    helps = [c for c, g in half.items() if g.saved > 0 and not g.is_nothing and not g.postpones]
    return f"Half the batch helps against {len(helps)} of {len(half)} causes: find out first what fills the memory"


def half_the_batch(run: Records, guess: Prediction | None = None) -> None:
    """Against which of the causes half the batch helps for good; leaks, where it cannot, counted apart."""
    tried = {c: row[HALF] for c, row in lab.given(run).items() if HALF in row}
    helps = [c for c, g in tried.items() if g.saved > 0 and not g.is_nothing and not g.postpones]
    others = ", ".join(SHORT[c] for c in tried if c not in helps)
    say(
        f"* Half the batch helps against {len(helps)} of {len(tried)}: {', '.join(SHORT[c] for c in helps) or 'none'}. "
        f"It does not against: {others}."
    )
    if leaks := [c for c in tried if c in lab.LEAKS]:
        rest = [c for c in tried if c not in leaks]
        say(
            f"* For the {len(leaks)} leaks of the trainer that is by definition: {lab.SAME_SAMPLES}. Of the "
            f"{len(rest)} that are no such leaks it helps against {len([c for c in helps if c in rest])}."
        )
    if guess is not None:
        say(f"* {guess.against(float(len([c for c in helps if c not in lab.LEAKS])))}")


def _share(given: lab.Given | None) -> float:
    return float("nan") if given is None else 0.0 if given.is_nothing else given.share


def _megabytes(given: lab.Given) -> str:
    return "0" if given.is_nothing else f"{given.saved / 1e6:.0f}"


def _best(run: Records, cause: str) -> str:
    best = lab.helpful(run, cause)
    return f"{best[0]}, {lab.given(run)[cause][best[0]].saved / 1e6:.0f} MB" if best else "nothing"


def messages(run: Records) -> None:
    """Each cause: what its victims saw, what it was taken for and why; of several ends the one with a message."""
    rows = {}
    for cause in dict.fromkeys(r.case["cause"] for r in run.where("named")):
        ends = run.where("named", cause=cause)
        told = next((r for r in ends if r.case["message"]), ends[0])
        wrong = {SHORT.get(r.case["named"], r.case["named"]) for r in ends if not r.value}
        rows[SHORT.get(cause, "nothing")] = {
            "ended by: exit code": ", ".join(f"{ENDED_BY[r.case['end']]}: {r.case['exit_code']}" for r in ends),
            "last words": _short(told.case["message"]) or "(none)",
            "because": told.case["sentence"],
            "found": f"WRONG: {', '.join(sorted(wrong))}" if wrong else "right" + ", by a guess" * _guessed(told),
        }
    show_table(pandas.DataFrame.from_dict(rows, orient="index"))
    named(run)


def _short(message: str) -> str:
    """Without torch's own place in its source."""
    return re.sub(r"\[enforce fail at [^\]]*\] err == 0\. ", "", message)[:100]


ENDED_BY = {
    "none": "came to its end",
    "data": "limit on data",
    "addresses": "limit on addresses",
    "killer": "killer",
    "shm": "a small /dev/shm",
}


def named(run: Records) -> None:
    """How many were named right, and which were taken for which."""
    rows = run.where("named")
    wrong = {pair: n for pair, n in lab.confusion(run).items() if pair[0] != pair[1]}
    right = sum(int(r.value) for r in rows)
    told = "; ".join(f"{WHAT.get(a, a)} was taken for {WHAT.get(b, b)} ({n})" for (a, b), n in wrong.items())
    guessed = sum(_guessed(r) for r in rows if r.value)
    luck = f", {guessed} of them by a guess" if guessed else ""
    say(f"* {right} of {len(rows)} ends were named by their signs alone{luck}." + (f" {told}." if told else ""))


def _guessed(end: Record) -> bool:
    return lab.GUESSED in end.case["sentence"]
