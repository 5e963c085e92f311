"""Plan the steps: some to warm up, some unchanged, then rounds of counterfactuals interleaved with unchanged steps.

Each round has both, so a slow phase of the machine affects both. Model, optimizer and random state are copied before a
counterfactual's turn and restored after it, so the script's training continues from unchanged steps only, with later
batches of its data. All ranks do the same in the same step, as rank 0 decides.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from labs.doctor import usage
from labs.doctor.counterfactuals import Modes, why_not
from labs.doctor.hooks import Hooks
from labs.doctor.profile import AS_IS, Profile, rare_kinds
from labs.doctor.ranks import Apart, Ranks, group
from labs.doctor.snapshot import StateSnapshot, has_room, of_optimizers
from labs.kit import _compat

WARM_UP = 5
MOST_WARM_UP = 40  # While torch.compile still compiles
LEAST_ROUNDS, MOST_ROUNDS = 6, 20  # At least as many as an interval needs
TURN_S = 0.1  # Length of a turn, which has at least one step and at most MOST_STEPS
MOST_STEPS = 10
LEAST_STEPS = 5  # In a turn on a GPU, which we don't wait for between these steps
BURST_S = 1.0  # Limit for a turn with workers, whose batches arrive in bursts
EVENTS, COSTLY, EXTRA_SHARE = 6, 0.05, 0.25
"""A rare part that takes more than COSTLY of the run must be seen EVENTS times. This may take more unchanged steps,
within EXTRA_SHARE of the time for counterfactuals."""
Steps = Generator[None, dict[str, float], None]  # Yields before each step, and is sent its seconds by kind


def plan(hooks: Hooks, profile: Profile, steps: int, seconds: float, modes: Modes) -> Steps:
    """Run all stages, recorded in `profile`. `seconds`: time for what comes after the `steps` unchanged steps."""
    profile.seconds = seconds
    profile.not_tried = dict.fromkeys(modes, "the run ended before: let it train longer")
    ranks = Ranks(profile.ranks)
    try:
        profile.stage = "warm-up"
        yield from _warm_up(hooks, ranks)
        profile.stage = "as it is"
        with usage.Usage(hooks, profile):
            profile.training["group"] = group()
            yield from _as_it_is(hooks, profile, ranks, steps, EXTRA_SHARE * seconds)
        profile.stage = "in turn"
        if ranks.alone:
            raise Apart("the doctor is not in the ranks that the script has started itself")
        longer_s = (len(profile.step_s) - steps) * statistics.fmean(profile.step_s)
        yield from _Interleaved(hooks, profile, ranks, seconds - longer_s, modes).all()
    except Apart as e:
        profile.unseen.append(f"counterfactuals: {e}")
        profile.not_tried = dict.fromkeys(profile.not_tried, str(e))
    ranks.part()
    profile.stage = "done"


def _warm_up(hooks: Hooks, ranks: Ranks) -> Steps:
    graphs, quiet = -1, 0
    for i in range(MOST_WARM_UP):
        yield
        if i == 0:
            ranks.look()
        quiet = quiet + 1 if _compat.compiled_graphs() == graphs and (hooks.called or not hooks.looking) else 0
        graphs = _compat.compiled_graphs()
        if all(ranks.each_says(quiet >= WARM_UP - 1)):
            return


def _as_it_is(hooks: Hooks, profile: Profile, ranks: Ranks, steps: int, extra_s: float) -> Steps:
    """Measure `steps` unchanged steps, and more within `extra_s` if a rare part is costly."""
    hooks.recording = True
    backwards, samples, marks = 0, 0, [hooks.mark()]
    hooks.synchronised = marks[0] is None  # a GPU has its own clock, so we don't wait for it
    done, wanted, graphs = 0, steps, _compat.compiled_graphs()
    while done < wanted:
        spans = yield
        usage.note_memory(hooks, profile)
        done += 1
        profile.step_s.append(sum(spans.values()))
        for kind, s in spans.items():
            profile.spans_s.setdefault(kind, []).append(s)
        profile.restarts += [done - 1] if hooks.restarts else []
        marks.append(hooks.mark())
        before, graphs = graphs, _compat.compiled_graphs()
        profile.compiles.append(graphs - before)
        backwards, samples = backwards + hooks.backwards, samples + hooks.samples
        profile.micro_batches, profile.samples = backwards / done, samples / done or None
        if done == steps:
            fit = int(extra_s / statistics.fmean(profile.step_s))
            wanted += min(fit, max(ranks.each_says(_more_events(profile))), *ranks.each_says(fit))
    hooks.recording, hooks.synchronised = False, True
    if marks[0] is not None:
        hooks.synchronise()
        profile.step_s = _between(marks)
        profile.device_s = {kind: [s / wanted] for kind, s in hooks.device_seconds().items()}
    profile.training["exchanges"] = hooks.exchanges / wanted


def _between(marks: Sequence[Any]) -> list[float]:
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _more_events(profile: Profile) -> int:
    """Return how many more steps it takes to see each costly rare part EVENTS times; 0 if there is none."""
    rare = [profile.spans_s[kind] for kind in rare_kinds(profile)]
    rare.append([s * (i in profile.restarts) for i, s in enumerate(profile.spans_s["data"])])
    seen = [sum(s > 0 for s in of) for of in rare if sum(of) > COSTLY * sum(profile.step_s)]
    return max((math.ceil((EVENTS - n) * len(profile.step_s) / n) for n in seen if n < EVENTS), default=0)


class _Interleaved:
    """Rounds with a turn for each mode, within a time limit."""

    def __init__(self, hooks: Hooks, profile: Profile, ranks: Ranks, seconds: float, modes: Modes) -> None:
        self.hooks, self.profile, self.ranks, self.modes = hooks, profile, ranks, modes
        self.ends = time.perf_counter() + seconds
        self.snapshot: StateSnapshot | None = None  # Valid until the next unchanged step
        self.found: tuple[list[Any], list[Any]] | None = None
        self.step_s, self.steps, self.settle, self.drain = ranks.first_says(self._lengths())

    def _lengths(self) -> tuple[float, int, int, int]:
        """Return a step in s, a turn's steps that count, those before them, and the steps after one without batches."""
        step_s, loader = statistics.median(self.profile.step_s), self.profile.loader
        waits = statistics.fmean(self.profile.spans_s.get("data", [0.0])) > 0.02 * step_s
        steps = max(1 if self.profile.device == "cpu" else LEAST_STEPS, min(MOST_STEPS, round(TURN_S / step_s)))
        if loader and loader.workers and waits:  # their batches arrive in bursts of that many
            steps = max(steps, min(loader.workers, round(BURST_S / step_s)))
        settle = int(step_s < TURN_S or self.profile.device != "cpu")
        # After steps that took no batches, workers have some ready, which must be used up first
        ready = min(loader.workers * loader.prefetch, 1 + settle + steps) if loader else 0
        return step_s, steps, settle, 1 + ready

    def all(self) -> Steps:
        """Run rounds in which each mode that can be tried has a turn, in random order."""
        draw, round_s, names = random.Random(0), 0.0, [AS_IS, *self._that_can()]
        for done in range(MOST_ROUNDS):
            late = done >= LEAST_ROUNDS and time.perf_counter() + round_s > self.ends
            order = draw.sample(names, len(names))
            if len(order) == 1 or self.ranks.first_says(late):
                break
            begun, turns = time.perf_counter(), {}
            for name in self.ranks.first_says(order):
                turns[name] = []
                yield from self._turn(name, turns[name])
            for name, of in turns.items():  # only whole rounds, so that one round has one index in all modes
                self.profile.interleaved_s.setdefault(name, []).append(of)
                self.profile.not_tried.pop(name, None)
            round_s = time.perf_counter() - begun

    def _that_can(self) -> list[str]:
        """Return the modes that all ranks can try, with enough rounds within the time. Drops the last ones first."""
        reasons = {mode: why for mode in self.modes if (why := why_not(mode, self.hooks, self.profile))}
        if not has_room(self.hooks, self.profile.local_ranks):
            full = "no memory is left for copies of model and optimizer, to put them back after it"
            reasons = dict.fromkeys(self.modes, full) | reasons
        reasons = {name: why for of_rank in self.ranks.each_says(reasons) for name, why in of_rank.items()}
        self.profile.not_tried |= reasons
        tried = [mode for mode in self.modes if mode not in reasons]
        have = self.ranks.first_says(self.ends - time.perf_counter())
        turn = 1 + self.settle + self.steps
        while tried and (need := LEAST_ROUNDS * self.step_s * (turn * (1 + len(tried)) + self.drain)) > have:
            given = self.profile.seconds or 0.0
            enough = math.ceil(given + 1.2 * (need - have))  # a margin, because steps vary
            self.profile.not_tried[tried.pop()] = f"{given:g} s are too short for it: --seconds {enough}"
        return tried

    def _turn(self, mode: str, counted: list[float]) -> Steps:
        """Run a turn in `mode`, and append its mean step in s to `counted`."""
        self.ranks.each_says(0)  # a barrier: a rank that is behind would slow down the others' first step
        hooks, spans, starts = self.hooks, [], []
        with self._applied(mode):
            hooks.synchronised = False  # don't wait for a GPU between these steps: the script doesn't either
            try:
                for _ in range((mode != AS_IS) + self.settle):
                    yield
                marks = [hooks.mark()]
                if marks[0] is None:
                    hooks.synchronise()  # start the host's clock when the device is idle
                for number in range(self.steps):
                    hooks.synchronised = number == self.steps - 1
                    spans.append((yield))
                    starts.append(hooks.loader_starts)
                    marks.append(hooks.mark())
            finally:
                hooks.synchronised = True
        # By a GPU's own clock, because the host runs ahead of it. Without rare parts
        rare = [sum(s for kind, s in of.items() if kind in rare_kinds(self.profile)) for of in spans]
        took = [sum(of.values()) for of in spans] if marks[0] is None else _between(marks)
        steps = [max(0.0, s - r) for s, r in zip(took, rare, strict=True)]
        # Steps that begin an epoch count only if most of them do
        usual = [s for s, start in zip(steps, starts, strict=True) if not start]
        counted.append(statistics.fmean(usual if 2 * len(usual) >= len(steps) else steps))
        if mode == AS_IS:
            usage.note_memory(hooks, self.profile)
        elif mode == "same batch again":
            for _ in range(self.drain):
                self.snapshot = None
                yield

    @contextmanager
    def _applied(self, mode: str) -> Iterator[None]:
        if mode == AS_IS:
            self.snapshot = None
            yield
            return
        if self.snapshot is None:
            self.found = self.found or of_optimizers()
            self.snapshot = StateSnapshot(self.hooks, self.found)
        with self.hooks.probes.paused() if self.hooks.probes else nullcontext():
            try:
                with self.modes[mode](self.hooks):
                    yield
            finally:
                self.snapshot.restore()
