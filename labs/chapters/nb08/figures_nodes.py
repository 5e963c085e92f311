"""Tables and sentences of notebook 08 on two machines: what ranks are told, wrong settings, a death."""

from __future__ import annotations

import pandas

from labs import two_nodes
from labs.kit.check import Prediction
from labs.kit.display import say
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
    say(
        f"{next(iter(two_nodes.answer(run)))} The sum of rank + 1 over {ranks} ranks is "
        f"{' and '.join(f'{s:g}' for s in sorted(sums))} on each of them: {met}."
    )


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
        after = f"{told[0].value:.1f} s" if len(told) else "never"
        rows.append(
            {
                "setting": case["setting"],
                "wrong": case["what"],
                "what the user sees": seen,
                "after": after,
                "by default after": case["waits"],
                "cure": case["cure"],
                "cure worked": cured,
            }
        )
    return pandas.DataFrame(rows).set_index("setting")


def unnoticed(run: Records, guess: Prediction) -> None:
    """With which wrong settings ranks computed on; the guess is their number."""
    quiet = [r.case["setting"] for r in run.where("went_on") if r.value]
    lines = [guess.against(len(quiet))]
    if quiet:
        lines.append(
            f"No error kept ranks from computing with: {', '.join(quiet)}. A loss is printed as always; "
            "only the world size is another."
        )
    say("\n".join(f"* {line}" for line in lines))


def absence(run: Records, guess: Prediction) -> None:
    """Whether a training with a machine that was killed ends with the same bits; how long it was away."""
    away, killed, redone = (run.one(m).value for m in ("away_s", "killed_at_step", "steps_redone"))
    whole = run.one("loss", run="undisturbed").samples
    final = [run.one("final_loss", run=which).value for which in ("undisturbed", "killed")]
    equal = bool(run.one("state_equal").value)
    same = "the same bit for bit as those" if equal else "NOT the same as those"
    lines = [
        guess.against(away),
        f"It was killed before step {killed:.0f} of {len(whole)}; {redone:.0f} steps were "
        "done twice: those since the last checkpoint.",
        f"Weights, optimizer and the losses of all steps are {same} of a training that nobody disturbed: the last "
        f"loss is {final[1]:.6f}, there {final[0]:.6f}.",
    ]
    say("\n".join(f"* {line}" for line in lines))


def changes(run: Records) -> None:
    """World sizes while a machine comes and goes, and the seconds until ranks computed again."""
    words = {"alone": "Node 0 begins alone", "joined": "node 1 joins", "left": "node 1 is killed"}
    size = {r.case["moment"]: r.value for r in run.where("world_size")}
    told = [
        f"{words[m]}: {size[m]:.0f} {'rank computes' if size[m] == 1 else 'ranks compute'} after {r.value:.1f} s"
        for r in run.where("change_s")
        if (m := r.case["moment"])
    ]
    say(f"{'; '.join(told)}.")
