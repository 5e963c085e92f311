"""Which step is taken how: some to warm up, some as they are, then counterfactuals in turn with steps as they are.

A counterfactual's steps stand beside steps as they are in each round, so that a noisy machine decides nothing. Before
each of its turns model, optimizer and random state are copied, and put back after it: what the script trains goes on
from steps as they are alone, with other batches of its data. All ranks do the same in the same step: rank 0 says what.
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
MOST_WARM_UP = 40  # While torch.compile goes on compiling
LEAST_ROUNDS, MOST_ROUNDS = 6, 20  # At least as many as an interval needs
TURN_S = 0.1  # A turn has steps for so long, from one (of long steps) to MOST_STEPS (of short ones)
MOST_STEPS = 10
LEAST_STEPS = 5  # Of a turn on a device that works beside the host: between these steps it is not waited for
BURST_S = 1.0  # For a turn with workers, which give a batch each at about the same time: at most
EVENTS, COSTLY, EXTRA_SHARE = 6, 0.05, 0.25
"""What comes now and then and takes more than this share of the run is to be seen so many times: for that there are
further steps as they are, within a share of the time for counterfactuals."""
Steps = Generator[None, dict[str, float], None]  # Takes the next step, and is sent its seconds by kind


def plan(hooks: Hooks, profile: Profile, steps: int, seconds: float, modes: Modes) -> Steps:
    """All steps that are wanted, noted in `profile`. Ends when they are done. `seconds`: for what is after `steps`."""
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
    """More than `steps`, as many as fit into `extra_s`, where something comes now and then and costs much."""
    hooks.recording = True
    backwards, samples, marks = 0, 0, [hooks.mark()]
    hooks.synchronised = marks[0] is None  # a GPU has a clock of its own: it isn't waited for
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
    """Further steps after which each rare thing that costs much has been seen EVENTS times; 0 if there is none."""
    rare = [profile.spans_s[kind] for kind in rare_kinds(profile)]
    rare.append([s * (i in profile.restarts) for i, s in enumerate(profile.spans_s["data"])])
    seen = [sum(s > 0 for s in of) for of in rare if sum(of) > COSTLY * sum(profile.step_s)]
    return max((math.ceil((EVENTS - n) * len(profile.step_s) / n) for n in seen if n < EVENTS), default=0)


class _Interleaved:
    """Rounds of turns, within a time."""

    def __init__(self, hooks: Hooks, profile: Profile, ranks: Ranks, seconds: float, modes: Modes) -> None:
        self.hooks, self.profile, self.ranks, self.modes = hooks, profile, ranks, modes
        self.ends = time.perf_counter() + seconds
        self.snapshot: StateSnapshot | None = None  # Copies, as long as they are those of the last step as it is
        self.found: tuple[list[Any], list[Any]] | None = None
        self.step_s, self.steps, self.settle, self.drain = ranks.first_says(self._lengths())

    def _lengths(self) -> tuple[float, int, int, int]:
        """A step in s; steps of a turn that count, and before them; steps after one that took no batches."""
        step_s, loader = statistics.median(self.profile.step_s), self.profile.loader
        waits = statistics.fmean(self.profile.spans_s.get("data", [0.0])) > 0.02 * step_s
        steps = max(1 if self.profile.device == "cpu" else LEAST_STEPS, min(MOST_STEPS, round(TURN_S / step_s)))
        if loader and loader.workers and waits:  # their batches come in bursts of as many
            steps = max(steps, min(loader.workers, round(BURST_S / step_s)))
        settle = int(step_s < TURN_S or self.profile.device != "cpu")
        # After steps that took no batches workers have some ready, which a step as it is must first use up
        ready = min(loader.workers * loader.prefetch, 1 + settle + steps) if loader else 0
        return step_s, steps, settle, 1 + ready

    def all(self) -> Steps:
        """Rounds, in each of which each that can be tried has a turn."""
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
            for name, of in turns.items():  # all at once: those of one round stand at one place
                self.profile.interleaved_s.setdefault(name, []).append(of)
                self.profile.not_tried.pop(name, None)
            round_s = time.perf_counter() - begun

    def _that_can(self) -> list[str]:
        """On all ranks, within the time, with rounds enough for an interval: the last ones are left out first."""
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
            enough = math.ceil(given + 1.2 * (need - have))  # steps don't take the same time again
            self.profile.not_tried[tried.pop()] = f"{given:g} s are too short for it: --seconds {enough}"
        return tried

    def _turn(self, mode: str, counted: list[float]) -> Steps:
        """`counted`: gets the mean step."""
        self.ranks.each_says(0)  # one that is behind would slow down this turn's first step on others
        hooks, spans, starts = self.hooks, [], []
        with self._applied(mode):
            hooks.synchronised = False  # between these steps a GPU is not waited for, as in the script itself
            try:
                for _ in range((mode != AS_IS) + self.settle):
                    yield
                marks = [hooks.mark()]
                if marks[0] is None:
                    hooks.synchronise()  # the host's clock begins when the device has nothing left to do
                for number in range(self.steps):
                    hooks.synchronised = number == self.steps - 1
                    spans.append((yield))
                    starts.append(hooks.loader_starts)
                    marks.append(hooks.mark())
            finally:
                hooks.synchronised = True
        # By a GPU's own clock: the host runs ahead of it. What is rare is in no step
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
