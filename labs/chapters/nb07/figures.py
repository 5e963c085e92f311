"""Figures and sentences of notebook 07 on one all-reduce: its steps, its bytes on the wire, its time by size."""

from __future__ import annotations

import statistics

import pandas

from labs import all_reduce_anatomy, nccl_log
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.explore import Slider, explore
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Record, Records
from labs.parts.communication.ring import snapshots
from labs.parts.sources.published import all_reduce_of_bert, all_reduce_on_8_h200
from labs.parts.timing.collectives import LatencyBandwidth, bus_factor, fit


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


def two_sizes(run: Records, guess: Prediction) -> None:
    """Latency and bandwidth from the smallest and the largest size, how wrong they are between, and a fit to all."""
    sizes = [r.case["size"] for r in run.where("all_reduce_s")]
    seconds = [r.value for r in run.where("all_reduce_s")]
    times = [estimate(r.samples, "s") for r in run.where("all_reduce_s")]
    ends = fit([sizes[0], sizes[-1]], [seconds[0], seconds[-1]])
    errors = [100 * (ends.seconds(s) / t - 1) for s, t in zip(sizes, seconds, strict=True)]
    shown = [e for s, t, e in zip(sizes, times, errors, strict=True) if not t.low <= ends.seconds(s) <= t.high]
    worst = max(shown or errors, key=abs)
    message = f"A line through two sizes is {abs(worst):.0f}% off at {_bytes(sizes[errors.index(worst)])}"
    if not shown:
        message = "How wrong a line through two sizes is, this run is too noisy to tell"
    fig, ax = figure(
        message, xlabel="bytes of the buffer", ylabel="milliseconds of an all-reduce", records=run, legend_below=True
    )
    points(ax, sizes, [milliseconds(r) for r in run.where("all_reduce_s")], label="all-reduce")
    curve(ax, sizes, [1e3 * ends.seconds(s) for s in sizes], label="through the first and the last size")
    whole = fit(sizes, seconds)
    curve(ax, sizes, [1e3 * whole.seconds(s) for s in sizes], label="fitted to all sizes", color=SERIES[2])
    log_axes(ax, sizes, TICKS_MS)
    ax.set_ylim(min(seconds) * 500, max(seconds) * 2000)
    show(fig, alt=f"{message}. Fitted to all: {_link(whole)}.")
    say(
        "\n".join(
            f"* {line}" for line in (_guessed(guess, shown), _line_text(shown, times), _fit_text(sizes, times, whole))
        )
    )


def _guessed(guess: Prediction, shown: list[float]) -> str:
    """The prediction beside the largest error that is shown, if one is."""
    if shown:
        return guess.against(max(map(abs, shown)))
    return "Whether your prediction is right, this run cannot tell."


def _line_text(shown: list[float], times: list[Estimate]) -> str:
    if not shown:
        return "The largest distance from the line is within the interval of that size: an error of it cannot be told."
    return f"The line misses the intervals of {len(shown)} of {len(times)} sizes."


TICKS_MS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


def milliseconds(record: Record) -> Estimate:
    """Median and interval of a record that is in seconds."""
    return estimate([1e3 * s for s in record.samples], "ms")


def _fit_text(sizes: list[float], times: list[Estimate], whole: LatencyBandwidth) -> str:
    fitted = [1e3 * whole.seconds(s) for s in sizes]
    errors = [abs(ms / t.value - 1) for ms, t in zip(fitted, times, strict=True)]
    outside = sum(not t.low <= ms <= t.high for ms, t in zip(fitted, times, strict=True))
    end = f"it misses the intervals of {outside} of {len(times)}" if outside else "all within the intervals"
    return (
        f"Fitted to all sizes: {_link(whole)}. From the medians it is {100 * statistics.median(errors):.0f}% off "
        f"in the middle and {100 * max(errors):.0f}% at most, {end}."
    )


def _link(found: LatencyBandwidth) -> str:
    rate = "no bandwidth that these sizes can tell" if found.b_s == float("inf") else f"{found.b_s / 1e9:.2g} GB/s"
    return f"{1e6 * found.latency_s:.0f} us and {rate}"


def _bytes(size: float) -> str:
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} B"


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


def bert_on_two_nodes(network: str = "Ethernet") -> None:
    """The published time from which both formulas start."""
    run = all_reduce_of_bert().where(network=network)
    start, largest = _with_two(run), max(run, key=_nodes)
    gpus = start.case["gpus_per_node"]
    print(
        f"published: {1e3 * start.value:,.0f} ms over {network} with 2 nodes of {gpus} GPUs. "
        f"How many ms with {_nodes(largest)} nodes?"
    )


def which_algorithm(guess: Prediction) -> None:
    """Two published clusters against two formulas: which of them is right where? Errors in %, anchored at two nodes.

    `guess` is the time over Ethernet with the most nodes, in ms.
    """
    rows = []
    for network in ("Ethernet", "InfiniBand"):
        run = all_reduce_of_bert().where(network=network)
        for record in sorted(run, key=_nodes):
            if _nodes(record) > 2:
                rows.append(
                    {"network": network, "nodes": _nodes(record), "published (ms)": f"{1e3 * record.value:.0f}"}
                    | {
                        name: f"{1e3 * s:.0f} ({100 * (s / record.value - 1):+.0f}%)"
                        for name, s in formulas(run, _nodes(record)).items()
                    }
                )
    show_table(pandas.DataFrame(rows).set_index(["network", "nodes"]))
    run = all_reduce_of_bert().where(network="Ethernet")
    largest = max(run, key=_nodes)
    lines = [guess.against(1e3 * largest.value, "published")]
    if guess == guess:
        apart = {name: abs(float(guess) - 1e3 * s) for name, s in formulas(run, _nodes(largest)).items()}
        lines.append(f"Your prediction is nearer to the {min(apart, key=apart.get)}.")
    print(" ".join(lines))


def formulas(run: Records, nodes: int) -> dict[str, float]:
    """Seconds with `nodes` nodes by each formula, both as published with two."""
    anchor = _with_two(run)
    gpus = anchor.case["gpus_per_node"]
    return {
        "flat ring": anchor.value * _ring(nodes * gpus) / _ring(2 * gpus),
        "ring of nodes": anchor.value * _ring(nodes) / _ring(2),
    }


def _with_two(run: Records) -> Record:
    return next(r for r in run if _nodes(r) == 2)


def _nodes(record: Record) -> int:
    return record.case["nodes"]


def _ring(n: int) -> float:
    return bus_factor("all_reduce", n)


def in_words(log: str, topology: str) -> None:
    """What labs.nccl_log says of a log and a table of the topology."""
    print(*nccl_log.answer(log, topology), sep="\n")
