"""Figures and tables of notebook 10 on hangs: calls of all ranks side by side, diagnoses, and who names the rank."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import pandas

from labs import hang_clinic as lab
from labs.hang_clinic.hang_ranks import server
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import BLUE, choice_map, figure, show
from labs.kit.record import Records
from labs.watch.diagnosis import diagnose
from labs.watch.evidence import Call, read

RANK, BOTH, SPEAKS = "names the rank", "shows both calls", "says something, not which rank"
SILENT, NOT_ASKED, CRASHES = "says nothing", "not asked", "crashes"
COLORS = {RANK: BLUE, BOTH: "#A6CEE8", SPEAKS: "#F3D9C9", SILENT: "#E3E3E3", NOT_ASKED: "#F7F0C8", CRASHES: "#4D4D4D"}
DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
LAST = 3
"""Calls before the end that are shown."""


def side_by_side(name: str, wrong: int, ranks: int) -> None:
    """Run one program until it stands still, and print the last calls of every rank, number by number."""
    with tempfile.TemporaryDirectory() as folder, server() as drill:
        drill(name, ranks, wrong, False, Path(folder), 1.0)
        evidence = read(Path(folder))
        calls = {e.rank: {c.number: c for c in e.calls or ()} for e in evidence}
        newest = max(max(of, default=0) for of in calls.values())
        rows = {
            f"call {n}": {f"rank {rank}": _call(of.get(n)) for rank, of in sorted(calls.items())}
            for n in range(newest - LAST, newest + 1)
        }
        show_table(pandas.DataFrame(rows).T)
        lines = sorted(
            {c.own[0] for of in calls.values() for n, c in of.items() if c.own and n >= newest - LAST}, key=str
        )
        say("; ".join(f"line {line.line} is `{line.source}`" for line in lines).capitalize() + ".")
        say(f"**Diagnosis.** {diagnose(evidence)}")


def _call(call: Call | None) -> str:
    if call is None:
        return "-"
    return f"{call.name}, line {call.own[0].line}" if call.own else call.name


def diagnoses(run: Records) -> None:
    """Each drill: the rank that was drawn, what the diagnosis says, whether that is right, whether the cure ends it."""
    rows, well = {}, 0
    for r in run.where("evidence_s"):
        case = {"drill": r.case["drill"], "round": r.case["round"]}
        right = [x.case["what"] for x in run.where("right", **case) if x.value]
        wrong = [w for w in lab.NAMED if w not in right]
        cured = [x.value for x in run.where("cured", **case)]
        rows[case["drill"]] = {
            "drawn": f"rank {r.case['wrong']}",
            "the files say": r.case["said"],
            **({"but": f"WRONG: {', '.join(wrong)}"} if wrong else {}),
        }
        well += all(cured)
    show_table(pandas.DataFrame.from_dict(rows, orient="index").fillna(""))
    whole = sum("but" not in row for row in rows.values())
    cured = f"; cured, {well} of {len(rows)} end well" if run.where("cured") else ""
    say(f"* Rank, collective and line right: {whole} of {len(rows)}{cured}.")
    reading = statistics.median(r.value for r in run.where("reading_s"))
    patience = run[0].config["patience_s"]
    say(
        f"* From the last progress to the files it took {max(r.value for r in run.where('evidence_s')):.1f} s at most, "
        f"with a patience of {patience:g} s; to read them {1e3 * reading:.0f} ms."
    )
    if left := sum(r.value for r in run.where("leftovers")):
        say(f"* {left:g} processes or folders are left of them.")


def who_names_the_rank(diagnosed: Records, asked: Records, guess: Prediction | None = None) -> None:
    """Drills against ways to ask: torch's own two checks, and the recorders of all ranks."""
    names = [
        name
        for name in dict.fromkeys(r.case["drill"] for r in diagnosed.where("right", what="rank"))
        if asked.where("names", drill=name)
    ]
    cells = {tool: [_told(asked, tool, name) for name in names] for tool in lab.TOOLS}
    files = "files of all ranks"
    cells[files] = [RANK if diagnosed.one("right", drill=name, what="rank").value else SPEAKS for name in names]
    named = {tool: column.count(RANK) for tool, column in cells.items()}
    message = (
        f"Which rank? DETAIL names it in {named[DETAIL]} of {len(names)} and shows both calls in "
        f"{cells[DETAIL].count(BOTH)}; the files of all ranks name it in {named[files]}"
    )
    fig, ax = figure(
        message,
        xlabel="what is asked",
        ylabel="what was planted",
        size=(7.8, 2.1 + 0.27 * len(names)),
        records=Records([*diagnosed.where("right", what="rank"), *asked.where("names", what="rank")]),
        legend_below=True,
    )
    heads = [
        "TORCH_DISTRIBUTED_\nDEBUG=DETAIL",
        "monitored_barrier\nbefore each call",
        "recorder, stacks and\nend of all ranks",
    ]
    choice_map(
        ax,
        list(zip(*cells.values(), strict=True)),
        columns=heads,
        rows=[n.replace("_", " ") for n in names],
        colors=COLORS,
        kind="measured",
    )
    ax.xaxis.tick_top()
    told = "; ".join(f"{tool}: {n} of {len(names)}" for tool, n in named.items())
    show(fig, alt=f"{message}. Table of hangs against ways to ask. Named right: {told}.")
    if crashed := [n for n, row in zip(names, zip(*cells.values(), strict=True), strict=True) if CRASHES in row]:
        say(
            f"* {', '.join(crashed)}: under DETAIL the ranks crash below Python (SIGSEGV), before anything hangs. "
            "Without DETAIL none of these programs ends so: it is the check that crashes. With NCCL it was not tried."
        )
    if guess is not None:
        say(f"* {guess.against(float(named[DETAIL]))}")


def _told(asked: Records, tool: str, name: str) -> str:
    of = {what: asked.one("names", tool=tool, drill=name, what=what).value for what in (*lab.SAID, "crashed")}
    if not of["asked"]:
        return NOT_ASKED
    return (
        RANK
        if of["rank"]
        else BOTH
        if of["both"]
        else CRASHES
        if of["crashed"]
        else SPEAKS
        if of["anything"]
        else SILENT
    )
