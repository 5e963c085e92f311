"""The figure of notebook 10 on preemption: of what the seconds consist that a training loses."""

from __future__ import annotations

from labs import preemption as lab
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import SERIES, figure, prediction, show, spans
from labs.kit.record import Records


def preemption(run: Records, guess: Prediction | None = None) -> None:
    """From the signal to the step that it had reached, for each habit, part by part; `guess`: s without a handler."""
    lost = {r.case["habit"]: r.value for r in run.where("lost_s")}
    parts = list(dict.fromkeys(r.case["part"] for r in run.where("part_s")))
    again = {habit: run.one("part_s", habit=habit, part="steps again").value for habit in lost}
    starting = {habit: lost[habit] - again[habit] for habit in lost}
    most = max(again.values())
    message = "The habit decides: steps done again cost more than a start"
    if most < (least := min(starting.values())):
        message = f"Steps done again cost at most {most:.1f} s here, everything else at least {least:.1f} s"
    fig, ax = figure(
        message,
        xlabel="since the signal (s)",
        ylabel="what the job does",
        records=run.where("part_s"),
        size=(7.8, 1.9 + 0.5 * len(lost)),
        legend_below=True,
    )
    seconds = {p: [run.one("part_s", habit=habit, part=p).value for habit in lost] for p in parts}
    longest = {p: s.index(max(s)) if max(s) > 0.01 * max(lost.values()) else None for p, s in seconds.items()}
    for row in range(len(lost)):
        at = 0.0
        for k, part in enumerate(parts):
            s = seconds[part][row]
            spans(ax, row, [(at, at + s)], color=SERIES[k % len(SERIES)], label=part if row == longest[part] else "")
            at += s
    ax.set_yticks(range(len(lost)), list(lost))
    ax.set_ylim(len(lost) - 0.5, -0.5)
    ax.set_xlim(0, None)
    if guess is not None and "no handler" in lost:
        prediction(ax, float(guess), list(lost).index("no handler"))
    told = "; ".join(f"{h}: {s:.1f} s, of it {again[h]:.1f} s for steps again" for h, s in lost.items())
    show(fig, alt=f"{message}. {told}.")
    if guess is not None and "no handler" in lost:
        say(f"* {guess.against(lost['no handler'])}")
    say("\n".join(f"* {line}" for line in lab.answer(run)))
