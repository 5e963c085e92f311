"""Figures and tables of notebook 05 about saving training, damaged files, killed ranks and how often to save."""

from __future__ import annotations

import pandas

from labs.common.checkpoints import checkpoint_interval
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import estimate
from labs.kit.plot import SERIES, curve, figure, log_axes, prediction, show
from labs.kit.record import Records
from labs.sharded_checkpoint import costs
from labs.training_checkpoint import lost_in

WAYS = {"in place": "onto the old file", "rename": "beside it, then renamed", "full": "labs.checkpoints"}
BROKEN = {
    "missing": "a part is missing",
    "truncated": "a part is cut short",
    "flipped": "a bit of a part is flipped",
    "stale": "a part is from an older checkpoint",
    "no_metadata": "the metadata is missing",
}
READERS = {"torch.load": "torch.load", "CRC-32, torch.load": "zip's own CRC-32 first", "load": "labs.checkpoints"}


def resumed(run: Records) -> pandas.DataFrame:
    """What a training looks like after a restart that forgot one piece of its state."""
    rows = []
    for r in run.where("equal_losses"):
        name = r.case["forgotten"]
        rows.append(
            {
                "forgotten": name,
                "steps until the loss differs": "never"
                if run.one("bitwise_equal", forgotten=name, part="losses").value
                else int(r.value),
                "parameters differ by": f"{run.one('parameter_difference', forgotten=name).value:.0%}",
                "samples repeated": int(run.one("repeated_samples", forgotten=name).value),
                "test loss at once": f"{run.one('test_loss', run='resumed', forgotten=name, at='resume').value:.2f}",
                "labs.checkpoints": "refuses it" if run.one("refused", forgotten=name).value else "resumes",
            }
        )
    return pandas.DataFrame(rows).set_index("forgotten")


def kills(run: Records, guess: Prediction) -> None:
    """In a table and words: share of the kills during a save that lose the last good checkpoint, by way of writing."""
    found = {way: lost_in(run, way) for way in WAYS}
    rows = {
        name: {
            "kills during a save": found[way].n,
            "that lose the checkpoint": str(found[way]) if found[way].n else "no kill came in time",
            "modelled, at most": f"{100 * run.one('predicted_lost_share', way=way).value:.0f} %",
            "half-written files left beside it": f"{sum(run.one('leftovers', way=way).samples):.0f}",
        }
        for way, name in WAYS.items()
    }
    show_table(pandas.DataFrame(rows).T.rename_axis("the file is written"))
    said = f"{guess.against(found['in place'])} " if found["in place"].n else ""
    say(
        f"SIGKILLs at seeded random moments of a save; those that came when it had just returned do not count. {said}"
        "Half-written files are cleared away by the next save of labs.checkpoints. A kill is not a power failure: what "
        "fsync is for cannot be tried here."
    )


def damage_table(run: Records) -> pandas.DataFrame:
    """What each reader says of files that were damaged on purpose: loaded silently, or noticed."""
    rows = []
    for damage in dict.fromkeys(r.case["damage"] for r in run.where("files")):
        cells = {"damage": damage}
        for reader, name in READERS.items():
            n = {
                v: int(run.one("files", damage=damage, reader=reader, verdict=v).value)
                for v in ("noticed", "silent", "harmless")
            }
            cells[name] = f"{n['silent']} of {sum(n.values())} loaded"
        used = run.one("previous_used", damage=damage).samples
        rows.append({**cells, "previous one used": f"{sum(used):.0f} of {len(used)}"})
    return pandas.DataFrame(rows).set_index("damage")


def restart(run: Records, guess: Prediction) -> None:
    """In a table and words: where the time goes between a rank's kill and the next step, by way to start workers."""
    starts = list(dict.fromkeys(r.case["start"] for r in run.where("restart_s", run="killed")))
    phases = list(dict.fromkeys(r.case["phase"] for r in run.where("phase_s")))
    noted = {s: run.where("phase_s", run="killed", start=s) for s in starts}
    seconds = {s: dict.fromkeys(phases, 0.0) | {r.case["phase"]: r.value for r in noted[s]} for s in starts}
    total = {s: run.one("restart_s", run="killed", start=s).value for s in starts}
    rows = {
        f"started by {s}, s": {p: f"{t:.2f}" for p, t in (seconds[s] | {"together": total[s]}).items()} for s in starts
    }
    show_table(pandas.DataFrame(rows).rename_axis("after the kill"))
    if "torchrun" not in starts:
        return say("Without fresh interpreters (a smoke run) nothing can be said of torchrun.")
    slow = max(phases, key=lambda p: seconds["torchrun"][p])
    said = guess.against(estimate([total["torchrun"]], "s"))
    same = "equal, bit for bit" if run.one("state_equal", start="torchrun").value else "DIFFERENT"
    say(
        f"Under torchrun most of the time goes into: {slow}. {said} One restart each: an order of magnitude, not a "
        f"law. Model and optimizer at the end, against those of a training that nobody killed: **{same}**."
    )


def restarts(run: Records) -> pandas.DataFrame:
    """Each run of the fork server: what was killed, how often all ranks were started again, is the result the same?

    Without the one under torchrun, which a smoke run leaves out: `restart` tells how that one ended.
    """
    rows = []
    for r in run.where("state_equal", start="fork server"):
        case = {k: r.case[k] for k in ("run", "start")}
        names = ("restarts", "processes", "killed_at_step", "resumed_at_step", "steps_redone")
        found = {n: [int(x.value) for x in run.where(n, **case)] for n in names}
        rows.append(
            {
                "run": case["run"],
                **{n.replace("_", " "): found[n][0] if found[n] else "" for n in names},
                "model and optimizer": "equal, bit for bit" if r.value else "DIFFER",
            }
        )
    return pandas.DataFrame(rows).set_index("run")


def stalls(run: Records) -> None:
    """In words: what a save costs training, standing still and slowed, and when it is on the disk, by way to save."""
    said = list(costs(run))
    during = run.where("step_s", when="during async_save")
    alone, size = estimate(run.one("step_s", when="alone").samples, "s"), run.where("state_bytes")[0].value
    meanwhile = f" and {estimate(during[0].samples, 's')} during an async save" if during else ""
    said.append(f"{size / 1e6:.0f} MB of state per rank. A step takes {alone} alone{meanwhile}.")
    say("\n".join(f"* {line}" for line in said))


def shards(run: Records) -> pandas.DataFrame:
    """A sharded checkpoint read by another number of ranks, and damaged on purpose."""
    rows = [
        {
            "what": f"saved by {r.case['saved_by']}, loaded by {r.case['loaded_by']} ranks: {r.case['part']}",
            "result": "equal, bit for bit" if r.value else "DIFFERS",
            "with checksums": "",
        }
        for r in run.where("equal")
    ]
    for damage in dict.fromkeys(r.case["damage"] for r in run.where("noticed")):
        told = [bool(run.one("noticed", damage=damage, checksums=c).value) for c in (False, True)]
        words = ["noticed" if t else "loaded, silently wrong" for t in told]
        rows.append({"what": BROKEN.get(damage, damage), "result": words[0], "with checksums": words[1]})
    return pandas.DataFrame(rows).set_index("what")


def interval(run: Records, guess: Prediction) -> None:
    """Figure: share of the time lost against the interval between saves, for a published rate of failures.

    A save is that of 12 bytes per parameter of a 405B model, on several disks that are each as fast as this machine's.
    """
    size, seconds = run.one("checkpoint_bytes", state="large", way="full"), run.one("save_s", state="large", way="full")
    rate = size.value / estimate(seconds.samples, "s").value
    published = checkpoint_interval.llama_3()
    mtbf_s = published.one("mtbf_s", gpus=16_384).value
    saves = {f"{disks:,} disks like this one": 405e9 * 12 / (rate * disks) for disks in (64, 2048)}
    best = {name: checkpoint_interval.optimum(s, mtbf_s) / 60 for name, s in saves.items()}
    message = "Saving too often costs as much as saving too rarely"
    fig, ax = figure(
        message,
        xlabel="minutes of training between two saves",
        ylabel="share of the time lost (%)",
        records=run,
        legend_below=True,
    )
    for k, (name, save_s) in enumerate(saves.items()):
        rows = checkpoint_interval.curve(save_s, mtbf_s, simulated=9).where("lost_share", part="total")
        for method, draw in (("formula", True), ("simulation", False)):
            x = [r.case["interval_s"] / 60 for r in rows if r.case["method"] == method]
            y = [100 * estimate(r.samples).value for r in rows if r.case["method"] == method]
            if draw:
                curve(ax, x, y, label=f"a save takes {save_s / 60:.1f} min: {name}", color=SERIES[k])
            else:
                ax.plot(x, y, marker="x", linestyle="", color=SERIES[k], label="_" if k else "simulated (modelled)")
    first = next(iter(saves))
    prediction(ax, float(guess), 100 * checkpoint_interval.lost_share(60 * float(guess), saves[first], mtbf_s))
    log_axes(ax, [1, 4, 16, 64, 256, 1024])
    ax.set_xlim(0.5, 2048)
    ax.set_ylim(0, 60)
    show(fig, alt=f"{message}. Least at " + "; ".join(f"{b:.0f} min ({n})" for n, b in best.items()))
    young = checkpoint_interval.young(saves[first], mtbf_s) / 60
    source, against = published[0].provenance["source"], guess.against(best[first], "modelled")
    hit = saves[first] / (60 * best[first] + saves[first])
    say(
        f"One failure in {mtbf_s / 3600:.1f} hours: 54 days over {published[0].value:.0f} unexpected "
        f"interruptions ({source}). "
        f"With {first} the best interval is {best[first]:.0f} minutes; Young's rule says {young:.0f}. {against} Then "
        f"{100 * hit:.0f} % of all kills come during a save: so much of the time goes into saves."
    )
