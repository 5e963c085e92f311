"""Picture of one DDP step on every rank, from a run of labs.ddp_overlap: what it computes and what it exchanges."""

from __future__ import annotations

from matplotlib.figure import Figure

from labs.kit.plot import SERIES, figure, spans
from labs.kit.record import Record, Records

COLORS = {"forward": SERIES[5], "gradients": SERIES[0], "backward waits": SERIES[3], "optimizer": SERIES[4],
          "all-reduce": SERIES[1]}  # fmt: skip


def draw(run: Records, message: str) -> Figure:
    """Two rows for each rank: what it computes above, its all-reduces below, in ms since the step began."""
    spans_s = run.where("timeline_s")
    ranks = sorted({r.layout["rank"] for r in spans_s})
    fig, ax = figure(message, xlabel="milliseconds since the step began", ylabel="rank", records=run,
                     size=(7.4, 3.4), legend_below=True)  # fmt: skip
    for row, rank in enumerate(ranks):
        parts = _parts([r for r in spans_s if r.layout["rank"] == rank])
        for part, color in COLORS.items():
            mine = [(1e3 * start, 1e3 * end) for start, end in parts[part]]
            spans(ax, 2 * row + (part == "all-reduce"), mine, label=part if row == 0 else "", color=color)
    ax.set_yticks(range(2 * len(ranks)), [f"{rank}, {what}" for rank in ranks for what in ("computes", "exchanges")])
    ax.set_ylim(2 * len(ranks) - 0.5, -0.5)
    return fig


def _parts(of_rank: list[Record]) -> dict[str, list[tuple[float, float]]]:
    """(start, end) in s by part; backward is cut where the rank's last gradient was there."""
    parts: dict[str, list] = {}
    for r in of_rank:
        parts.setdefault(r.case["part"], []).append(r.samples)
    [(start, end)] = parts.pop("backward")
    last = max((ready for ready, _ in parts.setdefault("all-reduce", [])), default=end)
    return parts | {"gradients": [(start, last)], "backward waits": [(last, end)]}
