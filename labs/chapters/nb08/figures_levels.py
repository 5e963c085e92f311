"""Figures and sentences of notebook 08 on two speeds: who talks to whom, and what an exchange costs over both."""

from __future__ import annotations

import pandas

from labs import two_levels
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import estimate
from labs.kit.plot import SERIES, bars, figure, prediction, show
from labs.kit.record import Records
from labs.two_levels.two_levels import Nodes, crossings

GUESSED = "hierarchical"
"""The way whose time the learner guesses, as a share of the flat all-reduce's."""


def who_talks(nodes: int = 2, per_node: int = 4) -> None:
    """Ranks of two machines as a mesh: rows are nodes, columns are ranks with the same place; three ways to talk."""
    machines = Nodes(nodes, per_node, 1e9, 1e8)
    rings = {
        "one ring over all,\nnode by node": machines.node_by_node(),
        "the same ring,\nin turn": machines.in_turn(),
    }
    crossing = [crossings(order, machines) for order in rings.values()]
    message = (
        f"The order of a ring decides whether {crossing[0]} or {crossing[1]} of its {machines.ranks} links "
        "leave a node; a mesh splits the work by level"
    )
    fig, first = figure(message, xlabel="place in the node", ylabel="node", size=(7.6, 2.9))
    first.remove()
    grid = fig.subplots(1, 3, sharey=True)
    for ax, (name, order) in zip(grid, rings.items(), strict=False):
        for one, other in zip(order, [*order[1:], order[0]], strict=True):
            _arrow(ax, machines, one, other, 0.22 if machines.same(one, other) else 0.12)
        ax.set_title(name, fontsize=10)
    for rank in range(machines.ranks):
        place = rank % per_node
        _arrow(grid[2], machines, rank, rank - place + (place + 1) % per_node, 0.22)
        _arrow(grid[2], machines, rank, (rank + per_node) % machines.ranks, 0.12)
    grid[2].set_title("hierarchical: rings in the rows,\nthe columns, the rows again", fontsize=10)
    for ax in grid:
        for rank in range(machines.ranks):
            ax.text(
                rank % per_node,
                machines.node(rank),
                rank,
                ha="center",
                va="center",
                fontsize=10,
                bbox={"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": "black"},
            )
        ax.set(xlim=(-0.6, per_node - 0.4), ylim=(nodes - 0.4, -0.6), xticks=range(per_node))
        ax.grid(False)
        ax.set_xlabel("place in the node")
    grid[0].set_yticks(range(nodes), [f"node {k}" for k in range(nodes)])
    show(
        fig, alt=f"{message}. Circles are ranks, rows are nodes. Blue arrows stay inside a node, orange ones leave it."
    )


def _arrow(ax, machines: Nodes, one: int, other: int, bend: float) -> None:
    (x, y), (to_x, to_y) = ((r % machines.per_node, machines.node(r)) for r in (one, other))
    same = machines.same(one, other)
    bend = 0.45 if same and abs(x - to_x) > 1 else bend
    ax.annotate(
        "",
        xy=(to_x, to_y),
        xytext=(x, y),
        arrowprops={
            "arrowstyle": "->",
            "color": SERIES[0] if same else SERIES[1],
            "linewidth": 1.8,
            "shrinkA": 11,
            "shrinkB": 11,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )


def bytes_table(run: Records) -> pandas.DataFrame:
    """What each node sends on each level in a step, in units of the gradients: closed form and the kernel's count."""
    size, rows = two_levels.gradient_bytes(run), {}
    for way in two_levels.ways_of(run):
        row = {}
        for level in ("inside", "across"):
            form = two_levels.of(run, "sent_bytes", "modelled", way=way, level=level).value
            counted = two_levels.of(run, "sent_bytes", "measured", way=way, level=level)
            row[f"{level}, formula"] = f"{form / size:.2f}"
            row[f"{level}, counted"] = f"{max(counted.samples) / size:.2f}" if counted else "not counted here"
        rows[way] = row
    table = pandas.DataFrame(rows).T
    table.columns.name = "of the gradients, per node"
    return table


def exchanges(run: Records, guess: Prediction) -> None:
    """Seconds of a step for each way, measured and by the formula, with what crosses."""
    ways, size = two_levels.ways_of(run), two_levels.gradient_bytes(run)
    took = {way: estimate(two_levels.of(run, "step_s", "measured", way=way).samples, "s") for way in ways}
    across = {w: two_levels.of(run, "sent_bytes", "modelled", way=w, level="across").value / size for w in ways}
    modelled = [1e3 * two_levels.of(run, "step_s", "modelled", way=way).value for way in ways]
    slow, fast = (f(took, key=lambda way: took[way].value) for f in (max, min))
    message = f"From {fast!r} to {slow!r}: {took[slow].value / took[fast].value:.0f} times the time"
    fig, ax = figure(
        message,
        xlabel="time of a step over two speeds (ms)",
        ylabel="way (vectors that leave a node)",
        records=run,
        size=(7.4, 4.6),
        legend_below=True,
    )
    (mark,) = ax.plot(
        modelled,
        range(len(ways)),
        "|",
        color="black",
        markersize=17,
        markeredgewidth=2,
        label="two-level formula (modelled)",
    )
    mark.set_gid("kind:modelled")
    names = [f"{way} ({across[way]:.2f})" for way in ways]
    bars(ax, names, [took[way].scaled(1e3, "ms") for way in ways], label="step")
    if GUESSED in took and "flat" in took:
        prediction(ax, float(guess) * 1e3 * took["flat"].value, ways.index(GUESSED))
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. " + ", ".join(f"{way}: {e}" for way, e in took.items()) + ".")
    say("\n".join(f"* {line}" for line in _exchange_text(run, guess)))


def _exchange_text(run: Records, guess: Prediction) -> list[str]:
    lines = []
    measured = {way: two_levels.of(run, "step_s", "measured", way=way) for way in two_levels.ways_of(run)}
    if {GUESSED, "flat"} <= set(measured):
        ratio = two_levels.measure.paired_ratio(measured[GUESSED].samples, measured["flat"].samples)
        lines.append(guess.against(ratio))
    errors = two_levels.over_formula(run)
    worst = max(errors, key=lambda way: abs(errors[way].value - 1))
    lines.append(f"The formula is furthest off for {worst!r}: a step takes {errors[worst]} what it says.")
    order = two_levels.ranking(run)
    lines.append(
        f"It sets {order.agree + order.open + len(order.contradict)} pairs of ways apart by more than "
        f"{100 * two_levels.APART - 100:.0f} %: {order.agree} are measured in that order, {order.open} cannot "
        f"be told."
    )
    if order.contradict:
        pairs = "; ".join(f"{fast!r} before {slow!r}" for fast, slow in order.contradict)
        lines.append(f"Measured the other way round: {pairs}. Latency and arithmetic are not in the formula.")
    if near := two_levels.close(run, "hsdp", "ddp"):
        formula, ratio = near
        told = "" if two_levels.measure.differs(ratio) else " The interval holds 1: no difference can be told."
        lines.append(
            f"Closer pairs it does not decide: HSDP should take {formula:.2f} times DDP's time, and took "
            f"{ratio}.{told}{_own_work(run)}"
        )
    return lines


def _own_work(run: Records) -> str:
    """What HSDP takes beside its collectives, which were timed by hand: FSDP2's own work, or nothing to be told."""
    if not (beside := two_levels.beside_by_hand(run)):
        return ""
    ratio, more_s, cpu_s = beside
    if ratio.low <= 1:
        return f" Its collectives by hand, without FSDP2: it took {ratio} of their time."
    return (
        f" It took {ratio} of the time of the same collectives by hand: {1e3 * more_s:.0f} ms are no links but "
        f"FSDP2's own work and the step's arithmetic, {1e3 * cpu_s:.0f} ms of CPU time over all ranks, which share "
        "the cores."
    )


def verdict_text(run: Records) -> None:
    """Whether the sums by hand are right and the counts are the formula's. The same on every machine that counts."""
    wrong = [r.case["way"] for r in run.where("max_error") if r.value]
    print(f"sums by hand: {'those of torch, bit for bit' if not wrong else f'WRONG: {wrong}'}")
    off = two_levels.counted_off(run)
    counted = any(r.kind != "modelled" for r in run.where("sent_bytes"))
    word = "those of the closed form" if not off else f"NOT those of the closed form: {'; '.join(off)}"
    print(f"bytes by level: {word if counted else 'not counted here'}")
