"""Figures and sentences of notebook 08 on thousands of ranks: bytes by level, what stays unknown, ZeRO by name."""

from __future__ import annotations

import pandas

from labs import many_ranks
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.plot import SERIES, curve, figure, log_axes, prediction, show
from labs.kit.record import Records
from labs.many_ranks.fake_ranks import CANNOT_SHOW

NAMES = {"ddp": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP", "tensor": "tensor + data", "pipeline": "pipeline + data"}
MARKS = "osD^v"


def bytes_by_level(run: Records, guess: Prediction) -> None:
    """Bytes per rank and step, inside and out of a node, against the number of ranks, for every way."""
    sizes, ways = many_ranks.sizes(run), _ways(run)
    most = sizes[-1]
    across = {way: many_ranks.levels(run, way, most)["across"] / 1e6 for way in ways}
    top = max(across, key=across.__getitem__)
    message = f"On {most:,} ranks {NAMES[top]} sends the most out of its node: {across[top]:.1f} MB per rank and step"
    fig, first = figure(message, xlabel="ranks", ylabel="MB", records=run, size=(7.6, 4.3))
    first.remove()
    axes = fig.subplots(1, 2, sharey=True)
    for ax, level in zip(axes, ("inside", "across"), strict=True):
        for k, way in enumerate(ways):
            ys = [many_ranks.levels(run, way, n)[level] / 1e6 for n in sizes]
            curve(ax, sizes, ys, label=NAMES[way] if level == "inside" else "_", color=SERIES[k])
            ax.lines[-1].set(marker=MARKS[k], markersize=5)
        log_axes(ax, sizes)
        ax.set_yscale("symlog", linthresh=0.1)  # on one node nothing leaves it: 0 must have a place
        ax.set_yticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
        ax.set_xlabel("ranks")
        ax.set_title("inside a node" if level == "inside" else "out of its node", fontsize=10)
    axes[0].set_ylabel("bytes per rank and step (MB)")
    axes[0].set_ylim(bottom=-0.02)
    axes[0].legend(loc="lower right", fontsize=9, ncols=1, frameon=False)  # where no line is
    prediction(axes[1], most, float(guess))
    told = ", ".join(f"{NAMES[way]} {mb:.2f} MB" for way, mb in across.items())
    show(fig, alt=f"{message}. Out of the node on {most:,} ranks: {told}. All are counted from calls of fake ranks.")
    say("\n".join(f"* {line}" for line in _level_text(run, guess)))


def _ways(run: Records) -> list[str]:
    return [way for way in NAMES if run.where("equal", way=way)]


def _level_text(run: Records, guess: Prediction) -> list[str]:
    most, lines = many_ranks.sizes(run)[-1], []
    across = {way: many_ranks.levels(run, way, most)["across"] for way in _ways(run)}
    if "fsdp" in across:
        if guess == guess:  # NaN where nothing was predicted
            lines.append(
                f"You predicted {float(guess):g} MB out of the node for FSDP2 on {most:,} ranks; counted from "
                f"the calls of a fake rank it is {across['fsdp'] / 1e6:.1f} MB."
            )
        pad = padding(run, most)
        lines.append(
            f"FSDP2 cuts the rows of each parameter and sends equally many for every rank: on {most:,} ranks it sends "
            f"{pad:.1f} times what the parameters themselves would need; the rest is padding."
        )
    if {"fsdp", "hsdp"} <= set(across):
        lines.append(
            f"HSDP, with shards inside a node only, sends {across['hsdp'] / across['fsdp']:.2f} times FSDP2's "
            "bytes out of a node there."
        )
    return lines


def padding(run: Records, ranks: int) -> float:
    """What FSDP2 sends on `ranks` ranks over what it would send if no row were added."""
    from labs.common.sharding.traffic import sent_bytes

    config = many_ranks.Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in run[0].config.items()})
    shape = config.shape
    outside = (shape.vocabulary + shape.places + 2) * shape.width
    size = 4 * (2 * shape.parameters - outside)  # gathered: blocks twice, the rest once
    plain = sent_bytes("all_gather", size, ranks) + sent_bytes("reduce_scatter", 4 * shape.parameters, ranks)
    return sum(many_ranks.levels(run, "fsdp", ranks).values()) / plain


def checks_text(run: Records) -> None:
    """Whether the counts are the closed forms', and those of two real ranks. The same on every machine."""
    for way in _ways(run):
        equal = all(r.value for r in run.where("equal", way=way))
        forms = "the bytes of the closed form" if equal else "NOT the bytes of the closed form"
        same = run.where("same_calls", way=way)
        real = (
            "no real ranks here"
            if not same
            else ("the calls of two real ranks" if same[0].value else "NOT the calls of two real ranks")
        )
        print(f"{NAMES[way]}: {forms}; {real}")


def on_the_wire(run: Records) -> pandas.DataFrame:
    """Bytes that two real ranks sent, as the kernel counts them, beside the closed form."""
    rows = {}
    for r in run.where("tcp_sent_bytes"):
        row = rows.setdefault(NAMES[r.case["way"]], {"formula": "", "counted": "not counted here"})
        row["formula" if r.kind == "modelled" else "counted"] = f"{max(r.samples) / 1e6:.2f} MB"
    table = pandas.DataFrame(rows).T
    table.columns.name = "two real ranks, a step"
    return table


def cannot_show() -> None:
    """What fake ranks leave out, as a table."""
    show_table(pandas.DataFrame({"what a fake job cannot show": CANNOT_SHOW}))


PAYS = {
    0: "the model's states fit each card: nothing to gather, and the fewest messages",
    1: "states do not fit, or room is wanted: the same bytes on the wire as DDP",
    2: "gradients are the next largest part: still DDP's bytes, but accumulation scatters each micro-step's",
    3: "not even the 16-bit parameters fit: half as many bytes again, each step, to be hidden behind computing",
}
"""When each stage pays. Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7."""
BY_NAME = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3, FSDP2"}


def zero_table(parameters: int = 7_000_000_000, ranks: int = 64) -> None:
    """States of a rank by ZeRO's stages, 16-bit training with Adam, what a rank sends, and when it pays. Modelled."""
    rows = {}
    for stage, (states, sent) in many_ranks.zero_bytes(parameters, ranks).items():
        row = {what: f"{size / 1e9:.2f} GB" for what, size in states.items()}
        rows[BY_NAME[stage]] = row | {
            "together": f"{sum(states.values()) / 1e9:.2f} GB",
            "sent per step": f"{sent / 1e9:.1f} GB",
            "pays when": PAYS[stage],
        }
    table = pandas.DataFrame(rows).T
    table.columns.name = f"modelled, {parameters / 1e9:g} billion parameters, {ranks} ranks"
    show_table(table)
