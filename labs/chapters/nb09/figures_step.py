"""Figures and sentences of notebook 09 on one step: its shares, the profiler's own cost, memory."""

from __future__ import annotations

from collections.abc import Mapping

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labs import memory_timeline, profile_step
from labs.common.oracle.trace import CATEGORIES
from labs.common.profiling.shares import SHARES
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import differs, estimate
from labs.kit.plot import GREY, SERIES, TINTS, bars, curve, figure, prediction, show, spans, stack
from labs.kit.record import Records

COLORS = dict(zip(SHARES, (*(SERIES[k] for k in (2, 3, 5, 0, 1, 4)), GREY, TINTS[2]), strict=True))
MEMORY = {
    "parameters": SERIES[0],
    "optimizer": SERIES[5],
    "inputs/buffers": SERIES[3],
    "gradients": SERIES[2],
    "temporaries": SERIES[4],
    "activations": SERIES[1],
}
"""From the bottom to the top: what changes least lies lowest."""
MB = 1e6


def shares(runs: Records | Mapping[str, Records], guess: Prediction | None = None, of: str = "backward") -> None:
    """A stacked bar for every rank of every run, by name; `guess`: the share of `of` on rank 0 of the first, in %."""
    named = {"": runs} if isinstance(runs, Records) else dict(runs)
    rows = [
        (f"{name}, rank {rank}" if name else f"rank {rank}", run, rank)
        for name, run in named.items()
        for rank in profile_step.ranks(run)
    ]
    label, first, rank = rows[0]
    found, _ = profile_step.typical(first, rank)
    most = max(found, key=found.__getitem__)
    percent = {name: 100 * seconds / sum(found.values()) for name, seconds in found.items()}
    message = f"{label.capitalize()}: {percent[most]:.0f} % of a step is {most}"
    joined = [r for run in named.values() for r in run]
    fig, ax = figure(
        message,
        xlabel="time of a step under the profiler (ms, measured)",
        ylabel="rank",
        records=joined,
        size=(7.6, 2.3 + 0.5 * len(rows)),
    )
    used = [s for s in SHARES if any(s in profile_step.typical(r, k)[0] for _, r, k in rows)]
    told = []
    for row, (name, run, of_rank) in enumerate(rows):
        start, (parts, _) = 0.0, profile_step.typical(run, of_rank)
        for share in used:
            ms = 1e3 * parts[share] if share in parts else 0.0
            spans(ax, row, [(start, start + ms)], label=share if row == 0 else "", color=COLORS[share])
            start += ms
        told.append(f"{name}: " + ", ".join(f"{n} {1e3 * s:.2f} ms" for n, s in parts.items()))
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    _one_legend(fig, used)
    show(fig, alt=f"{message}. {'; '.join(told)}.")
    lines = (
        []
        if guess is None or guess != guess
        else [f"You predicted {float(guess):g} % for {of}; it is {percent.get(of, 0.0):.0f} %."]
    )
    say("\n".join(f"* {line}" for line in [*lines, *share_text(first)]))


def _one_legend(fig: Figure, names: list[str], columns: int = 4) -> None:
    """Below all axes: `names` for the first labelled artists, in a few columns. The axes' own legends are left out."""
    handles = next(h for h, _ in (ax.get_legend_handles_labels() for ax in fig.axes) if h)
    for ax in fig.axes:
        for artist in ax.get_legend_handles_labels()[0]:
            artist.set_label("_")
    width, height = fig.get_size_inches()
    room = 0.2 + 0.2 * -(-len(names) // columns)  # inches
    fig.set_size_inches(width, height + room)
    legend = fig.legend(
        handles,
        names,
        loc="lower left",
        ncols=columns,
        fontsize=9,
        frameon=False,
        bbox_to_anchor=(0.005, 0.22 / (height + room)),
    )
    legend.set_in_layout(False)
    for ax in fig.axes:
        ax.set_xlabel(ax.get_xlabel() + "\n" * (round(room / 0.19)), linespacing=1.0)  # the legend's place


def share_text(run: Records) -> list[str]:
    """Whether the shares are the whole step, and whether two ways to find exposed communication agree."""
    covered = profile_step.covered(run)
    lines = [
        "A bar is a sum, no timeline: exposed communication lies inside the time of `backward()`, in many pieces. The "
        "share backward is what that call computes.",
        "Bars are means over the middle half of the steps by length: medians of shares do not sum to a step.",
        f"The shares come from the trace. Summed, they are {covered} of the step by the host's clock.",
    ]
    if run.where("step_s", mode="no_sync"):
        trace, clock = profile_step.exposed_two_ways(run)
        agree = trace.low <= clock.high and clock.low <= trace.high
        lines.append(
            f"Exposed communication on rank 0, medians: {trace} in the trace; by the clock, without a "
            f"profiler, a step takes {clock} more than under no_sync. "
            + ("The intervals meet: no difference can be told." if agree else "They differ.")
        )
    return lines


NOTES = {"on": "times", "shapes": "times and shapes", "memory": "times and memory", "stacks": "times and stacks"}
"""Of every operation."""


def cost(run: Records, guess: Prediction | None = None) -> None:
    """How many times as long a step takes under the profiler, and the bytes of trace; `guess`: that of "stacks"."""
    price = profile_step.price(run)
    told = [name for name, ratio in price.items() if differs(ratio)]
    message = "What looking costs, this run cannot show"
    if told:
        most = max(told, key=lambda name: price[name].value)
        message = f"A step takes {price[most].value:.2f} times as long while the profiler notes {NOTES[most]}"
    fig, ax = figure(
        message,
        xlabel="time of a step over one without a profiler (x)",
        ylabel="noted of each operation",
        records=run,
        size=(7.4, 3.4),
    )
    kb = {name: run.one("trace_bytes", profiler=name).value / 1e3 for name in price}
    names = [f"{NOTES[name]}\n{kb[name]:.0f} kB of trace a step" for name in price]
    bars(ax, names, list(price.values()), label="step")
    if guess is not None:
        prediction(ax, float(guess), list(price).index("stacks"))
    ax.axvline(1, color="black", linestyle=":", linewidth=1)
    show(fig, alt=f"{message}. " + ", ".join(f"{NOTES[name]}: {ratio}" for name, ratio in price.items()) + ".")
    say("\n".join(f"* {line}" for line in cost_text(run, guess)))


def cost_text(run: Records, guess: Prediction | None = None) -> list[str]:
    """The price of one noted operation, what a long trace would hold, and the learner's prediction."""
    price, lines = profile_step.price(run), []
    if guess is not None and guess == guess:
        lines.append(guess.against(price["stacks"]))
    if unclear := [NOTES[name] for name, ratio in price.items() if not differs(ratio)]:
        lines.append(f"Not to be told from 1 in this run: {', '.join(unclear)}.")
    # CPU time: what noting takes is computing, and a neighbour's turn on the core is not in it
    off, on = (run.one("cost_cpu_s", profiler=name).samples for name in ("off", "on"))
    by_cpu = profile_step.price(run, "cost_cpu_s")["on"]
    events = run.one("trace_events", profiler="on").value
    if differs(by_cpu):
        each = sorted((b - a) / events for a, b in zip(off, on, strict=True))[len(off) // 2]
        lines.append(
            f"A step has {events:.0f} bars in its trace: noting one costs {1e6 * each:.1f} µs of CPU time "
            f"in the mean ({by_cpu} of that of a step in all)."
        )
    else:
        lines.append(f"A step has {events:.0f} bars in its trace; what noting one costs, this run cannot show.")
    size = run.one("trace_bytes", profiler="on").value
    active = run[0].config["active"]
    lines.append(
        f"500 steps in one trace would be {500 * size / MB:.0f} MB; with active={active} a file has "
        f"{active * size / MB:.2f} MB."
    )
    stop = estimate(run.one("cost_stop_s", profiler="stacks").samples, "s")
    lines.append(
        f"Not in this bill: `stop()` takes {stop} after {active + 1} steps with stacks, and then comes the file."
    )
    return lines


COLUMNS = {
    "Self CPU": "time inside of the operation itself, without the operations that it called. Sums of it mean something",
    "CPU total": "from its begin to its end: with all that it called. Do not add up rows: a child counts again",
    "# of Calls": "in all recorded steps together, not in one",
    "CPU time avg": "CPU total over # of Calls",
    "Self CUDA, CUDA total": "the same for kernels on the GPU, which run later than the call that launched them",
    "CPU Mem, Self CPU Mem": "bytes allocated less bytes freed, not a peak; with profile_memory=True",
}
"""What each column of key_averages().table() means."""


def columns() -> None:
    """The columns of torch's own table in plain words. The same on every machine."""
    show_table(pandas.DataFrame({"means": COLUMNS}))


def operations(run: Records) -> None:
    """The operations with the most self time on rank 0, per step, and what happens if totals are summed."""
    rows = []
    for r in run.where("op_self_s"):
        if r.layout["rank"] == 0:
            total = next(t for t in run.where("op_total_s", op=r.case["op"]) if t.layout["rank"] == 0)
            rows.append(
                {
                    "operation": r.case["op"],
                    "calls": f"{r.case['calls']:g}",
                    "self": f"{1e3 * r.value:.3f} ms",
                    "total": f"{1e3 * total.value:.3f} ms",
                }
            )
    show_table(pandas.DataFrame(rows).set_index("operation"))
    say(f"* {profile_step.trap_text(run)}")


def memory(run: Records, guess: Prediction | None = None) -> None:
    """Bytes by category over the steps of each loop; `guess`: kB that a step of the last loop leaves behind."""
    loops = memory_timeline.loops_of(run)
    grown = {loop: memory_timeline.growth(run, loop) for loop in loops}
    worst = max(loops, key=lambda loop: sum(grown[loop].values()))
    left = memory_timeline.size_text(sum(grown[worst].values()))
    message = f"Loop {worst!r} leaves {left} behind in every step" if grown[worst] else "No loop leaves anything behind"
    fig, first = figure(message, xlabel="steps", ylabel="MB", records=run, size=(7.6, 4.2))
    first.remove()
    axes = fig.subplots(1, len(loops), sharey=True, squeeze=False)[0]
    used = [
        c for c in MEMORY if any(max(run.one("curve_bytes", loop=lo, category=c).samples) > 0.005 * MB for lo in loops)
    ]
    for ax, loop in zip(axes, loops, strict=True):  # what comes and goes lies on top
        _areas(ax, run, loop, used)
        ax.set_title(loop, fontsize=10)
        ax.set_xlabel("training steps")
    _one_legend(fig, [*used, "left after a step"])
    axes[0].set_ylim(0, 1.05 * max(max(r.samples) for r in run.where("peak_bytes")) / MB)
    axes[0].set_ylabel("tensors alive (MB, measured)")
    told = "; ".join(
        f"{loop}: " + (", ".join(f"{memory_timeline.size_text(b)} of {c} a step" for c, b in g.items()) or "nothing")
        for loop, g in grown.items()
    )
    show(fig, alt=f"{message}. Left behind in each step: {told}.")
    lines = list(memory_timeline.answer(run))
    if guess is not None and guess == guess:
        size = sum(grown[loops[-1]].values()) / 1e3
        lines.insert(0, f"You predicted {float(guess):g} kB for a step of {loops[-1]!r}: it is {size:.1f} kB.")
    say("\n".join(f"* {line}" for line in lines))


def _areas(ax: Axes, run: Records, loop: str, used: list[str]) -> None:
    moments = [0.0, *run.one("curve_step", loop=loop).samples[:-1]]  # each stands for the stretch that ends there
    parts = {c: [b / MB for b in run.one("curve_bytes", loop=loop, category=c).samples] for c in used}
    last = run.one("curve_step", loop=loop).samples[-1]
    stack(
        ax,
        [*moments, last],
        {c: [*values, values[-1]] for c, values in parts.items()},
        colors=[MEMORY[c] for c in used],
    )
    after = [
        sum(run.one("after_step_bytes", loop=loop, category=c).samples[k] for c in CATEGORIES) / MB
        for k in range(int(last))
    ]
    curve(ax, list(range(1, len(after) + 1)), after, kind="measured", label="left after a step", color="black")
    ax.lines[-1].set(marker="o", markersize=4)
