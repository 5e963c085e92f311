"""Plots of steps on every rank, with two rows each: computation and communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from labs.kit.plot import SERIES, figure, spans
from labs.kit.record import Records

COLORS = {
    "data": SERIES[2],
    "forward": SERIES[5],
    "gradients": SERIES[0],
    "backward": SERIES[0],
    "backward waits": SERIES[3],
    "optimizer": SERIES[4],
    "all-reduce": SERIES[1],
    "wait": SERIES[3],
}
"""Colour of each part of a step. Parts with the same colour never appear in one plot."""
EXCHANGED = ("all-reduce", "wait")


def two_rows(
    of_ranks: Mapping[int, Mapping[str, Sequence[tuple[float, float]]]], message: str, records: Records
) -> Figure:
    """Plot each rank in two rows, computation above communication. `of_ranks`: {rank: {part: spans in s}}."""
    fig, ax = figure(
        message,
        xlabel="milliseconds since the step began",
        ylabel="rank",
        records=records,
        size=(7.4, 2.2 + 0.6 * len(of_ranks)),
        legend_below=True,
    )
    for row, parts in enumerate(of_ranks.values()):
        for part, color in COLORS.items():
            if part in parts:
                mine = [(1e3 * start, 1e3 * end) for start, end in parts[part]]
                spans(ax, 2 * row + (part in EXCHANGED), mine, label=part if row == 0 else "", color=color)
    ax.set_yticks(range(2 * len(of_ranks)), [f"{r}, {what}" for r in of_ranks for what in ("computes", "exchanges")])
    ax.set_ylim(2 * len(of_ranks) - 0.5, -0.5)
    return fig
