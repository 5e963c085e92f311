"""A pipeline's schedule in notebook 06 with knobs, drawn as a timeline: who waits for whom?"""

from __future__ import annotations

from labs.chapters.nb06.figures import COLORS
from labs.common.pipelines import schedules
from labs.kit.explore import Menu, Slider, explore
from labs.kit.plot import figure, spans

WORK_S = 0.12  # forward and backward of the whole batch on one device: an example, which the knobs relate to
FORWARD = 1 / 3  # of a step's operations; backward takes twice those of forward
NAMES = {"GPipe": "gpipe", "1F1B": "1f1b"}


def pipeline() -> None:
    """Explore stages, micro-batches and costs of a pipeline."""
    explore(
        draw,
        schedule=Menu("schedule", list(NAMES), "1F1B"),
        stages=Slider("stages", (2, 3, 4, 6, 8), 4),
        micro_batches=Slider("micro-batches", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32), 4),
        message_ms=Slider("a message takes (ms)", (0, 0.1, 0.2, 0.5, 1, 2), 0),
        slowest=Slider("work of the last stage (x)", (1, 1.25, 1.5, 2, 3), 1),
    )


def stage_seconds(stages: int, micro_batches: int, slowest: float) -> list[float]:
    """Seconds of one micro-batch on each stage, forward and backward; the last has `slowest` times the others' work.

    All stages together always do WORK_S for the whole batch.
    """
    one = WORK_S / micro_batches / (stages - 1 + slowest)
    return [one] * (stages - 1) + [one * slowest]


def simulate(schedule: str, stages: int, micro_batches: int, message_ms: float, slowest: float) -> list:
    """The events of one step, by the course's cost model of pipelines."""
    seconds = stage_seconds(stages, micro_batches, slowest)
    return schedules.simulate(
        schedules.SCHEDULES[NAMES[schedule]],
        micro_batches,
        [FORWARD * s for s in seconds],
        [(1 - FORWARD) * s for s in seconds],
        [message_ms / 1e3] * (stages - 1),
    )


def draw(schedule: str, stages: int, micro_batches: int, message_ms: float, slowest: float) -> tuple:
    """What each stage does during a step."""
    events = simulate(schedule, stages, micro_batches, message_ms, slowest)
    span_s, idle = schedules.span_s(events), idle_share(events, stages)
    message = f"{schedule}, {stages} stages, {_count(micro_batches)}: {1e3 * span_s:.0f} ms, idle {idle:.0%}"
    fig, ax = figure(message, xlabel="milliseconds since the step began", ylabel="stage", legend_below=True)
    for kind in ("forward", "backward", "send", "receive"):
        for stage in range(stages):
            times = [(1e3 * e.start_s, 1e3 * e.end_s) for e in events if (e.stage, e.kind) == (stage, kind)]
            if times:
                first = stage == min(e.stage for e in events if e.kind == kind)
                spans(ax, stage, times, kind="modelled", label=kind if first else "", color=COLORS[kind])
    ax.set_yticks(range(stages))
    ax.set_ylim(stages - 0.4, -0.6)
    ax.set_xlim(0, max(1.02e3 * span_s, 1.05e3 * WORK_S))
    ax.axvline(1e3 * WORK_S, color="black", linestyle=":", linewidth=1)
    ax.annotate("one device ", (1e3 * WORK_S, stages - 0.42), fontsize=10, ha="right", va="bottom")
    actions = [schedules.SCHEDULES[NAMES[schedule]](s, stages, micro_batches) for s in range(stages)]
    kept = max(schedules.in_flight(a) for a in actions)
    ratio = WORK_S / span_s
    told = (
        f"{ratio:.2f} times as fast as one device with {stages}."
        if ratio > 1
        else (f"{stages} devices, and no faster than one ({ratio:.2f} x).")
    )
    bubble = schedules.bubble(stages, micro_batches)
    rest = "" if abs(idle - bubble) < 0.005 else f"; the rest is {_rest(message_ms, slowest)}"
    sentence = (
        f"{told} A stage computes {1 - idle:.0%} of the time. The bubble alone leaves (p-1)/(m+p-1) = "
        f"{bubble:.0%} idle{rest}. At most {_count(kept)} kept on a stage."
    )
    return fig, f"Timeline of a step: {message}. Forward and backward of each stage.", sentence


def idle_share(events: list, stages: int) -> float:
    """Share of the step, averaged over the stages, in which a stage computes nothing: messages count as idle."""
    computing = [e for e in events if e.kind in ("forward", "backward")]
    busy = sum(e.end_s - e.start_s for e in computing)
    return 1 - busy / (stages * schedules.span_s(events))


def _rest(message_ms: float, slowest: float) -> str:
    return " and ".join(["messages"] * (message_ms > 0) + ["waiting for the slowest stage"] * (slowest > 1))


def _count(n: int) -> str:
    return f"{n} micro-batch" + "es" * (n > 1)
