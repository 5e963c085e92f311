"""Figures and sentences of notebook 09 on all ranks at once: the merged timeline, and who comes last."""

from __future__ import annotations

import statistics

import pandas
from matplotlib.axes import Axes

from labs import last_to_arrive, rank_timeline
from labs.common.data_parallel import step_timeline
from labs.common.profiling.intervals import Span, clip, minus, union
from labs.common.profiling.late_training import PHASES
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import bars, figure, prediction, show
from labs.kit.record import Records

DRAWN_GAP_S = 1e-3  # spans so close are drawn as one


def timeline(run: Records) -> None:
    """A step of median lateness on all ranks, from a run of labs.rank_timeline; then what the clocks are worth."""
    found = late_ms(run)
    if not found:
        message = "One rank waits for nobody"
    else:
        last = max(found, key=lambda r: found[r].value)
        message = f"The others wait for rank {last}: it comes {found[last].value:.0f} ms after the first"
    fig = step_timeline.two_rows({r: _parts(lanes) for r, lanes in one_step(run).items()}, message, run)
    _mark_planted(fig.axes[0], run)
    told = ", ".join(f"rank {r} {e.value:.1f} ms" for r, e in found.items()) or "there is one rank"
    show(
        fig,
        alt=f"{message}. Each rank has a row of data, forward, backward and optimizer and a row of all-reduces "
        f"with the waiting in them. After the first to arrive: {told}.",
    )
    lines = [
        "All-reduce (dark orange) and wait (pink) are one exchange: hidden behind computing, and exposed.",
        "The white arrow is as long as what was planted; it is drawn in the middle of its part of the step.",
    ]
    say("\n".join(f"* {line}" for line in [*(lines if found else []), *rank_timeline.answer(run)]))


def _mark_planted(ax: Axes, run: Records) -> None:
    """An arrow as long as the planted delay, in the middle of the late rank's part in which it was planted."""
    [planted] = run.where("planted_s")
    of_rank, place = planted.case["of_rank"], planted.case["place"]
    lanes = one_step(run)
    if not planted.value or not (spans := lanes[of_rank].get(place)):
        return
    start, end = max(spans, key=lambda span: span[1] - span[0])
    middle, half, row = 500 * (start + end), 500 * planted.value, 2 * list(lanes).index(of_rank)
    ax.annotate("", (middle - half, row), (middle + half, row), arrowprops={"arrowstyle": "<->", "color": "white"})
    ax.text(middle, row - 0.06, f"planted: {2 * half:g} ms", color="white", ha="center", va="bottom", fontsize=9)


def late_ms(run: Records) -> dict[int, Estimate]:
    """{rank: ms after the first rank at the last collective of a step}, by the merged traces."""
    return {r.case["of_rank"]: estimate([1e3 * s for s in r.samples], "ms") for r in run.where("late_s")}


def one_step(run: Records) -> dict[int, dict[str, list[Span]]]:
    """{rank: {lane: spans}} of the step in which the last to arrive was as late as in most, in s since it began."""
    steps = {r.case["of_rank"]: _pairs(r.samples) for r in run.where("steps_s")}
    late = [max(step) for step in zip(*(r.samples for r in run.where("late_s")), strict=True)]
    middle = late.index(statistics.median_low(late)) if late else 0
    start, end = min(of[middle][0] for of in steps.values()), max(of[middle][1] for of in steps.values())
    lanes: dict[int, dict[str, list[Span]]] = {rank: {} for rank in steps}
    for r in run.where("spans_s"):
        inside = clip(_pairs(r.samples), start, end)
        lanes[r.case["of_rank"]][r.case["lane"]] = [(a - start, b - start) for a, b in inside]
    return lanes


def _pairs(flat: tuple[float, ...]) -> list[Span]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _parts(lanes: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """As drawn: while a rank waits, it is in neither backward nor all-reduce; spans that nearly touch are one."""
    waits = union(lanes.get("wait", []), DRAWN_GAP_S)
    rest = {lane: union(spans, DRAWN_GAP_S) for lane, spans in lanes.items() if lane != "wait"}
    return rest | {lane: minus(rest.get(lane, []), waits) for lane in ("backward", "all-reduce")} | {"wait": waits}


def timers_and_arrivals(run: Records, guess: Prediction) -> None:
    """What each rank's own timer says of a step, beside when each rank came to its last all-reduce."""
    own = {
        r.case["of_rank"]: estimate([1e3 * s for s in r.samples], "ms")
        for r in run.where("own_step_s", late="one rank")
    }
    late = {
        r.case["of_rank"]: estimate([1e3 * s for s in r.samples], "ms") for r in run.where("late_s", late="one rank")
    }
    message = message_of(run)
    fig, first = figure(
        message, xlabel="own timer: ms of a step", ylabel="rank", records=run, size=(7.4, 3.2), legend_below=True
    )
    first.remove()
    axes = fig.subplots(1, 2, sharey=True)
    names, planted = [str(rank) for rank in own], run.where("planted_s")[0].case["of_rank"]
    for ax, found, label in zip(
        axes, (own, late), ("own timer: ms of a step", "arrival: ms after the first"), strict=True
    ):
        bars(ax, names, found.values(), label="" if ax is axes[0] else "_")
        ax.set_xlim(
            0,
            1.25
            * max(1.0, float(guess) if guess == guess and ax is axes[0] else 1.0, *(e.high for e in found.values())),
        )
        ax.set_xlabel(label)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", color="#E3E3E3")
    axes[0].set_ylabel("rank")
    on_time = next((rank for rank in own if rank != planted), planted)
    prediction(axes[0], float(guess), on_time)
    show(fig, alt=f"{message}. Own timers: {_listed(own)}. After the first to arrive: {_listed(late)}.")
    who = list(last_to_arrive.answer(run))[:3]  # what it costs is in a table of its own
    say("\n".join(f"* {line}" for line in [*_guess_text(own[on_time], guess), *who]))


def message_of(run: Records) -> str:
    """What the two halves of the figure say together."""
    own = last_to_arrive.own_timers(run, "one rank").values()
    found = last_to_arrive.blame(run, "one rank")
    apart = 100 * (max(own) / min(own) - 1)
    timers = f"Own timers differ by {apart:.{1 if apart < 10 else 0}f} %"
    if not found.clear:
        return f"{timers}; who comes last cannot be told from this run"
    return f"{timers}; arrivals name rank {found.rank}, {1e3 * found.by.value:.0f} ms after the one before it"


def _listed(found: dict[int, Estimate]) -> str:
    return ", ".join(f"rank {r} {e}" for r, e in found.items())


def _guess_text(on_time: Estimate, guess: Prediction) -> list[str]:
    return [] if guess != guess else [guess.against(on_time)]


def phases(run: Records, case: str = "one rank") -> pandas.DataFrame:
    """Median ms of each phase by each rank's own timer, then its arrival: what a training's log could hold."""
    columns = {phase: last_to_arrive.own_timers(run, case, phase) for phase in PHASES}
    columns |= {"whole step": last_to_arrive.own_timers(run, case)}
    columns |= {"arrives after the first": {r: e.value for r, e in last_to_arrive.lateness(run, case).items()}}
    table = pandas.DataFrame(columns).map(lambda s: f"{1e3 * s:.1f} ms")
    table.index.name = "rank"
    return table
