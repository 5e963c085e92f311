"""Tables, figures and sentences of notebook 08 on two machines: what ranks are told, wrong settings, a death."""

from __future__ import annotations

import pandas

from labs import two_nodes
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import SERIES, bars, figure, show
from labs.kit.record import Records

MEANS = {
    "MASTER_ADDR": "where the ranks' own store is: the first node",
    "MASTER_PORT": "and its port; not the one where the torchruns meet",
    "WORLD_SIZE": "ranks of the job",
    "RANK": "this rank among all",
    "LOCAL_RANK": "this rank on its node: which GPU it takes",
    "LOCAL_WORLD_SIZE": "ranks on this node (--nproc-per-node)",
    "GROUP_RANK": "this node among all",
    "GROUP_WORLD_SIZE": "nodes of the job (--nnodes)",
    "TORCHELASTIC_RUN_ID": "which job (--rdzv-id)",
    "TORCHELASTIC_RESTART_COUNT": "how often this torchrun has started its ranks again",
    "TORCHELASTIC_MAX_RESTARTS": "how often it may (--max-restarts)",
}
"""What each variable that torchrun sets means, by its documentation (docs.pytorch.org, elastic/run)."""
LIVE_PORT = "MASTER_PORT"


def variables(run: Records) -> pandas.DataFrame:
    """A row for each variable, a column for each rank: what was in its environment. A free port is not shown."""
    rows: dict[str, dict[str, str]] = {}
    for r in run.where("variable"):
        case = r.case
        column = f"node {case['node']}, rank {case['on_rank']}"
        text = "(a free port)" if case["name"] == LIVE_PORT else case["text"]
        rows.setdefault(case["name"], {})[column] = text
    found = pandas.DataFrame([{"variable": name, **row, "means": MEANS[name]} for name, row in rows.items()])
    return found.set_index("variable")


def places(run: Records) -> None:
    """On which kind of machines the run was, and whether the ranks have met."""
    sums = {r.value for r in run.where("sum")}
    ranks = len(run.where("sum"))
    met = "all ranks met" if sums == {ranks * (ranks + 1) / 2} else "the ranks did NOT meet"
    say(f"{next(iter(two_nodes.answer(run)))} The sum of rank + 1 over {ranks} ranks is "
        f"{' and '.join(f'{s:g}' for s in sorted(sums))} on each of them: {met}.")  # fmt: skip


def wrong_settings(run: Records) -> pandas.DataFrame:
    """A row for each wrong setting: what is wrong, who told what first, with torch's own patience, and the cure."""
    rows = []
    for went_on in run.where("went_on"):
        case = went_on.case
        told = run.where("told_s", setting=case["setting"])
        seen = "nothing is said"
        if len(told):
            others = "; the other node still waits" if told[0].case["silent"] else ""
            seen = f"node {told[0].case['node']}: {told[0].case['line'].rstrip('.')}{others}"
        if went_on.value:
            seen = f"{went_on.value:.0f} rank(s) compute on, world size {case['of']}. Then {seen}"
        cured = "yes" if run.one("cured", setting=case["setting"]).value else "NO"
        rows.append({"setting": case["setting"], "wrong": case["what"], "what the user sees": seen,
                     "waits by default": case["waits"], "cure": case["cure"], "cure worked": cured})  # fmt: skip
    return pandas.DataFrame(rows).set_index("setting")


def patience(run: Records, guess: Prediction) -> None:
    """How long each wrong setting stays unnoticed, with the short timeouts of the drill; the guess is a number of rows.

    What no error told has no mark.
    """
    told = {r.case["setting"]: r.value for r in run.where("told_s")}
    quiet = [r.case["setting"] for r in run.where("went_on") if r.value]
    names = [r.case["setting"] for r in run.where("went_on")]
    early = [name for name in told if name not in quiet and told[name] < 1]
    message = (f"{len(told) - len([q for q in quiet if q in told])} of {len(names)} wrong settings end the job with an "
               f"error before it computes, {len(early)} of them within a second")  # fmt: skip
    fig, ax = figure(message, xlabel="start to first error (s), with short timeouts", ylabel="wrong setting",
                     records=run, legend_below=True)  # fmt: skip
    bars(ax, names, [told.get(name) for name in names], label="first error", color=SERIES[0])
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. A mark for each setting that an error told: "
                  + ", ".join(f"{n} {told[n]:.1f} s" for n in names if n in told) + ".")  # fmt: skip
    lines = [guess.against(len(quiet))]
    if quiet:
        lines.append(f"No error kept ranks from computing with: {', '.join(quiet)}. A loss is printed as always; "
                     "only the world size is another.")  # fmt: skip
    say("\n".join(f"* {line}" for line in lines))


def absence(run: Records, guess: Prediction) -> None:
    """Loss by step, undisturbed and with a machine that was killed; how long it was away, against the guess."""
    away, killed, redone = (run.one(m).value for m in ("away_s", "killed_at_step", "steps_redone"))
    whole, again = (run.one("loss", run=which).samples for which in ("undisturbed", "killed"))
    equal = bool(run.one("state_equal").value)
    message = ("A killed machine comes back: losses and weights are the same bit for bit" if equal else
               "A killed machine comes back: the result is NOT the same")  # fmt: skip
    fig, ax = figure(message, xlabel="optimizer step", ylabel="loss of rank 0 (nats)", records=run, legend_below=True)
    ax.plot(range(1, len(whole) + 1), whole, color=SERIES[0], linewidth=5, alpha=0.4,
            label="undisturbed (measured)", gid="kind:measured")  # fmt: skip
    ax.plot(range(1, len(again) + 1), again, color=SERIES[1], linewidth=1.2, label="killed, and back (measured)",
            gid="kind:measured")  # fmt: skip
    ax.axvline(killed, linestyle=":", color="black")
    ax.annotate("killed", (killed, ax.get_ylim()[1]), va="top", ha="left", fontsize=10)
    show(fig, alt=f"{message}. Both lines lie on each other; machine 1 is killed before step {killed:.0f}.")
    say(f"* {guess.against(away)}\n* {redone:.0f} steps were done twice: those since the last checkpoint.")


def changes(run: Records) -> pandas.DataFrame:
    """World sizes while a machine comes and goes, and the seconds until ranks computed again."""
    words = {"alone": "node 0 begins alone", "joined": "node 1 joins", "left": "node 1 is killed"}
    size = {r.case["moment"]: r.value for r in run.where("world_size")}
    rows = [{"moment": words[r.case["moment"]], "world size": f"{size[r.case['moment']]:.0f}",
             "until ranks compute": f"{r.value:.1f} s"} for r in run.where("change_s")]  # fmt: skip
    return pandas.DataFrame(rows).set_index("moment")
