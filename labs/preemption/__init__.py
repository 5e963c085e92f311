"""A scheduler sends SIGTERM, then kills: how many seconds are lost, and what does each habit save?

    python -m labs.preemption --nproc 1
    python -m labs.preemption --nproc 1 --save-every 40 --steps 200

About 22 s on 2 CPU cores. The recipe train_ddp_resume.py trains on two ranks, in separate processes. The whole job is
ended three times and restarted: with SIGTERM and the recipe's handler, which saves; with SIGTERM and no handler; and
killed at once. Each loss, and the final weights, are compared with an undisturbed training run.

labs.elastic_restart covers a single rank that dies and that torchrun restarts. Time in the queue comes on top.
"""

import itertools
import math
import signal
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder
from labs.preemption import requeued
from labs.preemption.requeued import Start

Habit = Literal["handler", "no handler", "killed at once"]
SENT = {"handler": signal.SIGTERM, "no handler": signal.SIGTERM, "killed at once": signal.SIGKILL}
SMOKE = {"habits": ("killed at once",), "large_bytes": 0}  # with --smoke on the command line


@dataclass(frozen=True)
class Config:
    """The training run, and when to preempt it."""

    habits: tuple[Habit, ...] = get_args(Habit)
    """What happens at each preemption, in this order."""
    save_every: int = 12
    """Steps between two saves."""
    after_save: float = 0.7
    """When to preempt, as a share of the interval between two saves (0 to below 1); the mean over it is modelled."""
    steps: int = 60
    """Steps of the whole training run."""
    batch_size: int = 600
    """Images per step, over both ranks."""
    grace_s: float = 30.0
    """Seconds between the scheduler's SIGTERM and SIGKILL.

    Kubernetes: terminationGracePeriodSeconds, 30 by default
    (https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination). Slurm, for a preemption: the
    GraceTime of the partition or QOS, 0 by default (https://slurm.schedmd.com/preempt.html). Its KillWait is for a job
    at its time limit.
    """
    large_bytes: int = 200_000_000
    """Bytes of a second file, saved as the recipe saves, to measure the disk's rate; 0: skip it."""
    seed: int = 0
    """Seed of the training run."""
    smoke: bool = False
    """Run one preemption, the first of `habits`."""

    def __post_init__(self) -> None:
        require(bool(self.habits), f"habits must be one or more of {', '.join(get_args(Habit))}")
        require(2 <= self.save_every <= 10_000, f"save_every must be from 2 to 10000 steps, not {self.save_every}")
        require(0 <= self.after_save < 1, f"after_save must be from 0 to below 1, not {self.after_save}")
        require(
            2 <= self.batch_size <= 10_000 and self.batch_size % 2 == 0,
            f"batch_size must be an even number from 2 to 10000, not {self.batch_size}",
        )
        require(0 < self.grace_s < math.inf, f"grace_s must be a positive number, not {self.grace_s}")
        require(
            self.large_bytes == 0 or 50_000_000 <= self.large_bytes <= 10**10,
            f"large_bytes must be 0 or from 50000000 to 10000000000, not {self.large_bytes}",
        )
        require(0 <= self.seed < 2**32, f"seed must be from 0 to 4294967295, not {self.seed}")
        last = self.preempted_at(len(self.habits) - 1)
        require(
            self.steps >= last + self.save_every,
            f"steps must be at least {last + self.save_every}, for {len(self.habits)} preemptions, not {self.steps}",
        )

    def preempted_at(self, index: int) -> int:
        """Return the step after which to send this preemption's signal."""
        return self.save_every * (index + 1) + max(1, round(self.after_save * self.save_every))


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput unless there is exactly one process, which starts the training run's ranks."""
    require(world_size == 1, f"preemption starts two ranks of its own: use nproc=1, not {world_size}")


def predict(step_s: float, save_every: int, start_s: float, handler: bool) -> float:
    """Return mean seconds lost per preemption: an end and a start, and without a handler half an interval.

    At a random moment of an interval between two saves, training has gone 0 to save_every steps beyond the last save.
    All of that is lost, on average save_every / 2 steps, counting a part of the interrupted step.
    """
    return start_s + (0.0 if handler else save_every / 2 * step_s)


def steps_redone(last: int, save_every: int, handler: bool) -> int:
    """Return the whole steps to redo if `last` was the last one completed; the interrupted step isn't counted."""
    return 0 if handler else last % save_every


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Train undisturbed, then train with one preemption and restart per habit."""
    with watched_folder() as root:
        options = {
            "steps": config.steps,
            "batch-size": config.batch_size,
            "save-every": config.save_every,
            "seed": config.seed,
            "log-every": 1,
            "dropout": 0.2,
        }
        habits = config.habits[:1] if config.smoke else config.habits
        total = len(habits) + 2
        whole = requeued.train(root, "whole", options | _files(root, "whole"), rank)
        rank.progress(1, total, "undisturbed")
        step_s = _step_s(whole)
        yield rank.record("step_s", "s", step_s)
        yield rank.record("save_s", "s", whole.seconds("saving", "saved")[:-1] or whole.seconds("saving", "saved"))
        yield rank.record("checkpoint_bytes", "B", (root / "whole.pt").stat().st_size)
        if config.large_bytes:
            seconds = requeued.save_s(root, config.large_bytes)
            yield rank.record("large_save_s", "s", seconds, bytes=config.large_bytes)
        starts: list[Start] = []
        for index, habit in enumerate([*habits, None]):
            stop = {} if habit is None else {"stop_after": config.preempted_at(index), "sent": SENT[habit]}
            start = requeued.train(
                root,
                f"start{index}",
                options | _files(root, "preempted"),
                rank,
                handler=habit != "no handler",
                grace_s=config.grace_s,
                **stop,
            )
            if starts:
                yield from _preempted(habits[index - 1], starts[-1], start, whole, config, rank)
            starts.append(start)
            rank.progress(index + 2, total, habit or "to the end")
        weights = [torch.load(root / f"{name}.weights", weights_only=True) for name in ("whole", "preempted")]
        same = weights[0].keys() == weights[1].keys() and all(
            torch.equal(w, weights[1][n]) for n, w in weights[0].items()
        )
        yield rank.record("weights_equal", "1", float(same))


def _files(root: Path, name: str) -> dict[str, Path]:
    return {"checkpoint": root / f"{name}.pt", "save": root / f"{name}.weights"}


def _step_s(start: Start) -> list[float]:
    """Return seconds from step to step, saves included, without the first step, which creates buffers."""
    times = [start.steps[s] for s in sorted(start.steps)]
    return [b - a for a, b in itertools.pairwise(times[1:])]


def _preempted(habit: Habit, before: Start, after: Start, whole: Start, config: Config, rank: Rank) -> Iterator[Record]:
    """Yield what this preemption cost, and what the formula says."""
    last, resumed = max(before.steps), min(after.steps) - 1
    parts = dict(requeued.phases(before, after))
    step_s, handler = statistics.median(_step_s(whole)), habit == "handler"
    # The parts include the first step, but a step's usual time is training, not a loss.
    start_s = max(0.0, sum(s for name, s in parts.items() if name != "steps again") - step_s)
    yield rank.record("lost_s", "s", sum(parts.values()), habit=habit)
    for name, seconds in parts.items():
        yield rank.record("part_s", "s", seconds, habit=habit, part=name)
    yield rank.record("redone", "steps", last - resumed, habit=habit, last=last)
    yield rank.record("redone", "steps", steps_redone(last, config.save_every, handler), kind="modelled", habit=habit)
    yield rank.record(
        "mean_lost_s", "s", predict(step_s, config.save_every, start_s, handler), kind="modelled", habit=habit
    )
    same = all(whole.losses[step] == loss for s in (before, after) for step, loss in s.losses.items())
    yield rank.record("losses_equal", "1", float(same), habit=habit)
    if saved := [e["time"] for e in before.events if e["event"] == "saved" and e["time"] > (before.signalled or 0)]:
        yield rank.record("saved_after_s", "s", saved[-1] - (before.signalled or 0), habit=habit)
    yield rank.record("exit_code", "1", before.codes[0], habit=habit)


def largest_state(run: Records) -> float:
    """Return the bytes that the handler could save within the grace period; nan if this run can't show it.

    The measured end contains a save of checkpoint_bytes and everything that takes the same time for any size. The rest
    of the grace period can save more bytes, at the rate between that save and the large one.
    """
    ends, large = run.where("part_s", habit="handler", part="end"), run.where("large_save_s")
    if not ends or not large:
        return math.nan
    size, save_s = run.one("checkpoint_bytes").value, statistics.median(run.one("save_s").samples)
    more_s, more = large[0].value - save_s, large[0].case["bytes"] - size
    left_s = run[0].config["grace_s"] - ends[0].value
    return size + more / more_s * left_s if more_s > 0 and more > 0 and left_s > 0 else math.nan


def answer(run: Records) -> Iterator[str]:
    """Yield what each habit lost and why; the formula; whether the result is the same; the grace period."""
    step_s = statistics.median(run.one("step_s").samples)
    for lost in run.where("lost_s"):
        habit = lost.case["habit"]
        parts = _parts(run, habit)
        slow = max(parts, key=lambda name: parts[name])
        measured = next(r for r in run.where("redone", habit=habit) if r.kind == "measured")
        yield (
            f"{habit.capitalize()}: {lost.value:.2f} s from the signal until training was where it had been, the "
            f"largest part of it for {slow} ({parts[slow]:.2f} s); {measured.value:.0f} steps done again, "
            f"{parts['steps again']:.2f} s; the job itself ended after {parts['end']:.2f} s."
        )
    yield from _did_it_pay(run)
    every = run[0].config["save_every"]
    yield (
        f"Modelled for a random moment: without a handler {every / 2 * step_s:.2f} s of steps are lost in the mean, "
        f"at most {every * step_s:.2f} s, with a save every {every} steps of {1e3 * step_s:.0f} ms; the step that "
        "is cut off counts. Here the signal came right after a step: only whole steps were done again."
    )
    equal = run.one("weights_equal").value and all(r.value for r in run.where("losses_equal"))
    yield (
        "Every loss and the weights at the end are those of the undisturbed training, bit by bit."
        if equal
        else "The preempted training is NOT the undisturbed one: losses or weights differ."
    )
    yield _grace(run)


def _parts(run: Records, habit: str) -> dict[str, float]:
    return {r.case["part"]: r.value for r in run.where("part_s", habit=habit)}


def _did_it_pay(run: Records) -> Iterator[str]:
    """Yield the handler's gain over the other habits' mean, and the spread of starts. Nothing for a single habit."""
    parts = {r.case["habit"]: _parts(run, r.case["habit"]) for r in run.where("lost_s")}
    others = [of for habit, of in parts.items() if habit != "handler"]
    if "handler" in parts and others:
        saved = statistics.fmean(of["steps again"] for of in others) - parts["handler"]["steps again"]
        longer = parts["handler"]["end"] - statistics.fmean(of["end"] for of in others)
        yield (
            f"Against the others the handler saved {saved:.2f} s of steps, and the job took "
            f"{abs(longer):.2f} s {'longer' if longer >= 0 else 'less'} to end: by these two parts alone "
            f"{abs(saved - longer):.2f} s {'less' if saved > longer else 'more'}."
        )
    if len(parts) > 1:
        starts = [sum(of.values()) - of["end"] - of["steps again"] for of in parts.values()]
        yield (
            f"All but the end and these steps took from {min(starts):.2f} to {max(starts):.2f} s in this run, and "
            "each way ran once: the totals cannot tell."
        )


def _grace(run: Records) -> str:
    """Say how long a save took, and how much would fit into the grace period if this run shows it."""
    grace, save_s = run[0].config["grace_s"], statistics.median(run.one("save_s").samples)
    said = f"A save of {run.one('checkpoint_bytes').value / 1e6:.1f} MB took {1e3 * save_s:.0f} ms"
    said += "".join(f", the handler's was on disk {r.value:.2f} s after SIGTERM" for r in run.where("saved_after_s"))
    for large in run.where("large_save_s"):
        said += f", a file of {large.case['bytes'] / 1e6:.0f} MB {large.value:.2f} s"
    most = largest_state(run)
    if math.isnan(most):
        return f"{said}: how much fits into a grace period of {grace:g} s, this run does not tell."
    return (
        f"{said}. If the disk keeps the rate from the one to the other, {most / 1e9:.1f} GB fit into a grace "
        f"period of {grace:g} s, less the end that was measured."
    )
