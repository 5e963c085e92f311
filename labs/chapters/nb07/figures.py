"""Figures and sentences of notebook 07 on one all-reduce: its steps, its bytes on the wire, its time by size."""

from __future__ import annotations

import pandas

from labs import all_reduce_anatomy, nccl_log
from labs.all_reduce_anatomy.ring import snapshots
from labs.common.sources.published import all_reduce_on_8_h200
from labs.common.timing.collectives import bus_factor, fit
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.explore import Slider, explore
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Record, Records


def ring_steps() -> None:
    """Explore the ring all-reduce, step by step: which ranks' numbers are in each part of each rank."""
    explore(draw_ring, ranks=Slider("ranks", (2, 3, 4, 5), 4))


def draw_ring(ranks: float) -> tuple:
    """Every step as a small picture, and how often each rank has sent a part."""
    ranks = int(ranks)
    steps = list(snapshots(ranks))
    message = f"{2 * (ranks - 1)} steps, and every part of every rank holds the sum of all {ranks}"
    fig, first = figure(message, xlabel="part", ylabel="rank", size=(7.4, 2.1))
    first.remove()
    grid = fig.subplots(1, len(steps), sharey=True)
    for ax, step in zip(grid, steps, strict=True):
        for rank in range(ranks):
            for part in range(ranks):
                n = len(step.holds[rank][part])
                ax.add_patch(_cell(part, rank, n, ranks))
                ax.text(
                    part + 0.5,
                    rank + 0.5,
                    n,
                    ha="center",
                    va="center",
                    fontsize=10 if ranks < 5 else 8,
                    color="white" if n > ranks / 2 else "black",
                )
            if step.sent:
                ax.add_patch(_frame(step.sent[rank], rank))
        ax.set(
            xlim=(0, ranks),
            ylim=(ranks, 0),
            xticks=[],
            yticks=[],
            aspect="equal",
            title=f"{step.step}\n{step.phase}" if step.step in (0, 1, ranks) else f"{step.step}\n",
        )
        ax.title.set_fontsize(9)
    grid[0].set_yticks([r + 0.5 for r in range(ranks)], [f"rank {r}" for r in range(ranks)])
    alt = (
        f"{message}. Columns of each small picture are parts, rows are ranks. A number says how many ranks' numbers "
        "are in that part, a frame which part was sent."
    )
    sent = len(steps) - 1  # one part in every step
    sentence = (
        f"Each rank sends {sent} parts, each 1/{ranks} of the vector: {sent / ranks:.2f} times the vector. "
        "More ranks: more steps, shorter messages, and never twice the vector."
    )
    return fig, alt, sentence


def _cell(part: int, rank: int, n: int, ranks: int):
    from matplotlib.patches import Rectangle

    return Rectangle((part, rank), 1, 1, facecolor=SERIES[0], alpha=n / ranks, edgecolor="white")


def _frame(part: int, rank: int):
    from matplotlib.patches import Rectangle

    return Rectangle((part + 0.06, rank + 0.06), 0.88, 0.88, fill=False, edgecolor=SERIES[1], linewidth=2)


def by_hand_text(run: Records) -> None:
    """Whether the ring by hand computes what torch's all-reduce computes. The same on every machine."""
    whole, random = (run.one("max_error", numbers=n).value for n in ("integers", "random"))
    ranks = run[0].layout["world_size"]
    print(f"whole numbers: {'the same bits as dist.all_reduce' if whole == 0 else f'off by {whole:g}'}")
    bound = all_reduce_anatomy.rounding_bound(ranks)
    print(f"random numbers: within the rounding of {ranks} additions: {random <= bound}")


def wire_table(run: Records) -> pandas.DataFrame:
    """Bytes on the wire by collective, in units of the buffer: what the busiest rank must send, what was counted."""
    rows = {}
    ranks = run[0].layout["world_size"]
    for record in run.where("sent_bytes"):
        if record.kind == "modelled":
            op, size = record.case["op"], record.case["size"]
            counted = [r for r in run.where("sent_bytes", op=op) if r.kind != "modelled"]
            sent = [f"{b / size:.2f}" for b in counted[0].samples] if counted else ["not counted here"]
            rows[op] = {"busiest rank needs": f"{record.value / size:.2f}", "ranks sent": ", ".join(sent)}
    table = pandas.DataFrame(rows).T
    table.columns.name = f"of the buffer, {ranks} ranks"
    return table


def busbw(run: Records, guess: Prediction) -> None:
    """Bus bandwidth of every collective."""
    found = {r.case["op"]: estimate(r.samples, r.unit) for r in run.where("busbw_b_s")}
    gb = {op: e.scaled(1e-9, "GB/s") for op, e in found.items()}
    slowest, fastest = (f(gb, key=lambda op: gb[op].value) for f in (min, max))
    apart = gb[slowest].high < gb[fastest].low
    message = f"{fastest} reaches {gb[fastest].value / gb[slowest].value:.1f} times the bus bandwidth of {slowest}"
    if not apart:
        message = "No collective surely reaches more bus bandwidth than another here"
    fig, ax = figure(message, xlabel="bus bandwidth (GB/s)", ylabel="collective", records=run, size=(7.0, 3.4))
    bars(ax, list(gb), gb.values())
    prediction(ax, float(guess), list(gb).index("all_reduce"))
    ax.set_xlim(left=0)
    show(fig, alt=f"{message}. " + ", ".join(f"{op}: {e}" for op, e in gb.items()) + ".")
    say(_busbw_text(run, gb, guess))


def _busbw_text(run: Records, gb: dict, guess: Prediction) -> str:
    ranks = run[0].layout["world_size"]
    lines = [
        guess.against(gb["all_reduce"]),
        f"The all-reduce's bus bandwidth is {gb['all_reduce']}: {bus_factor('all_reduce', ranks):g} times its "
        f"algorithm bandwidth, on {ranks} ranks.",
    ]
    counted = {r.case["op"]: max(r.samples) / r.case["size"] for r in run.where("sent_bytes") if r.kind != "modelled"}
    for op, sent in counted.items():
        needed = bus_factor(op, ranks) if op in gb else None
        if needed and sent > 1.2 * needed:
            lines.append(
                f"{op} sends {sent / needed:.2f} times what a ring would need: so the backend does it in another way."
            )
    return "\n".join(f"* {line}" for line in lines)


def milliseconds(record: Record) -> Estimate:
    """Median and interval of a record that is in seconds."""
    return estimate([1e3 * s for s in record.samples], "ms")


def published_fit(guess: Prediction) -> None:
    """The same on a published sweep of 8 H200: one line for all sizes, then one on each side of NCCL's switch."""
    run = all_reduce_on_8_h200()
    sizes, seconds = [r.case["size"] for r in run], [r.value for r in run]
    one = [fit(sizes, seconds).seconds(s) for s in sizes]
    two = [s for part in (slice(0, SWITCH), slice(SWITCH, None)) for s in _fitted(sizes[part], seconds[part])]
    worst = {name: _worst(line, seconds) for name, line in (("one", one), ("two", two))}
    message = f"On 8 H200 one line is {worst['one']:.0f}% off, one on each side of 1 MiB {worst['two']:.0f}%"
    fig, ax = figure(message, xlabel="bytes of the buffer", ylabel="line over published time (x)", records=run)
    for label, line, color in (
        ("one latency, one bandwidth", one, SERIES[1]),
        ("one of each on each side of 1 MiB", two, SERIES[2]),
    ):
        curve(ax, sizes, [a / b for a, b in zip(line, seconds, strict=True)], label=label, color=color)
    points(ax, sizes, [1.0] * len(sizes), kind="published", label="NCCL on 8 H200")
    log_axes(ax, sizes[1::3])
    ax.set_ylim(0.6, 1.4)
    show(fig, alt=f"{message}. Sizes from 32 KiB to 16 GiB; the errors are the largest of all sizes.")
    print(guess.against(worst["one"]))


SWITCH = 6  # sizes up to 1 MiB: there NCCL ran another algorithm and protocol, as the source says


def _fitted(sizes: list[float], seconds: list[float]) -> list[float]:
    line = fit(sizes, seconds)
    return [line.seconds(s) for s in sizes]


def _worst(line: list[float], seconds: list[float]) -> float:
    """Largest error of `line` in %."""
    return 100 * max(abs(a / b - 1) for a, b in zip(line, seconds, strict=True))


def in_words(log: str, topology: str) -> None:
    """What labs.nccl_log says of a log and a table of the topology."""
    print(*nccl_log.answer(log, topology), sep="\n")
