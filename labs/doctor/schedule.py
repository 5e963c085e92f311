"""Which step is taken how: some to warm up, some as they are, then counterfactuals in turn with steps as they are.

A counterfactual's steps stand beside steps as they are in each round, so that a noisy machine decides nothing. Before
each of its turns model, optimizer and random state are copied, and put back after it: what the script trains goes on
from steps as they are alone, with other batches of its data. All ranks do the same in the same step: rank 0 says what.

What the script may not survive comes last, one after the other: what was seen before is safe in the profile by then.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from labs.doctor import usage
from labs.doctor.hooks import Hooks
from labs.doctor.profile import AS_IS, Gone, Profile, not_reached, rare_kinds
from labs.doctor.ranks import Apart, Ranks
from labs.doctor.snapshot import ScriptObjects, StateSnapshot
from labs.kit import _compat

WARM_UP = 5
MOST_WARM_UP = 40  # While torch.compile goes on compiling
LEAST_ROUNDS, MOST_ROUNDS = 6, 40
"""At least as many as an interval needs (labs.kit.measure.fewest, which would import torch before the script does)."""
NARROW, NARROW_ROUNDS = 1.08, 10
"""After so many rounds no more are taken if the upper end of each interval is at most so many times the lower one. What
the interval holds decides nothing: to stop as soon as it holds no 1 would accuse every other healthy script."""
TURN_S = 0.1  # A turn has steps for so long, from one (of long steps) to MOST_STEPS (of short ones)
MOST_STEPS = 10
LEAST_STEPS = 5  # Of a turn on a device that works beside the host: between these steps it is not waited for
BURST_S = 1.0  # For a turn with workers, which give a batch each at about the same time: at most
TRIAL_SHARE = 0.2  # Of the time, for each trial beside the script's loop
SPARE = 1.2
"""Times the seconds that are missing: those that a user is asked to add, for steps do not take the same time again."""
EVENTS, COSTLY, EXTRA_SHARE = 6, 0.05, 0.25
"""What comes now and then and takes more than this share of the run is to be seen so many times: for that there are
further steps as they are, within a share of the time for counterfactuals."""
MUCH_SLOWER, SLOWER = 8.0, 2.0
"""A counterfactual whose fastest step takes so many times a step as it is, in two rounds on end, has no further one
where the time is short of MOST_ROUNDS; the second number counts when it is over. The fastest, for on a busy machine
some steps of a millisecond take a hundred."""
Steps = Generator[None, dict[str, float], None]  # Takes the next step, and is sent its seconds by kind


class Mode(Protocol):
    """A step in which one thing is otherwise: that estimates what a fix gives."""

    name: str
    settle: int  # Steps after its start that are not counted
    samples_factor: float  # Samples in one of its steps, in those of a step as it is
    needs_restore: bool  # Whether its steps leave something else in model or optimizer than a step as it is would
    risky: bool  # Whether a script may not survive it
    on_request: bool  # Tried only if its name is given: it takes long

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        """Why it cannot be tried or would show nothing; "" if it can."""

    def enter(self, hooks: Hooks) -> None:
        """Until `leave`."""

    def leave(self, hooks: Hooks) -> None:
        """As it was before."""


class Trial(Protocol):
    """What cannot be changed within the script's loop: it is tried beside it, between two steps."""

    name: str
    on_request: bool

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        """As that of a Mode."""

    def measure(self, hooks: Hooks, profile: Profile, seconds: float) -> None:
        """Into `profile`, within the time."""


def plan(hooks: Hooks, profile: Profile, steps: int, seconds: float, modes: Sequence[Mode | Trial]) -> Steps:
    """All steps that are wanted, noted in `profile`. Ends when they are done. `seconds`: for what is after `steps`."""
    profile.seconds, profile.planned = seconds, [mode.name for mode in modes]
    ranks = Ranks(profile.ranks)
    try:
        profile.stage = "warm-up"
        yield from _warm_up(hooks, ranks)
        profile.stage = "as it is"
        begun = time.perf_counter()
        yield from _as_it_is(hooks, profile, ranks, steps, EXTRA_SHARE * seconds)
        longer_s = (time.perf_counter() - begun) * (1 - steps / len(profile.step_s))  # than it would have taken
        profile.stage = "in turn"
        yield  # what the process uses is looked at here, before anything is copied
        if ranks.alone:
            raise Apart("the doctor is not in the ranks that the script has started itself")
        yield from _Interleaved(hooks, profile, ranks, seconds - longer_s).all(modes)
    except Apart as e:
        if not profile.step_s:
            profile.error = str(e)
        profile.unseen.append(f"counterfactuals: {e}")
        profile.left_out |= dict.fromkeys(not_reached(profile), str(e))
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
    """Where their time goes. What is noted for each line is that of these steps.

    More than `steps`, as many as fit into `extra_s`, where something comes now and then and costs much.
    """
    hooks.recording, hooks.spans.calls, graphs = True, 0, [_compat.compiled_graphs()]
    backwards, samples, marks = [], [], [hooks.mark()]
    hooks.synchronised = marks[0] is None  # a GPU has a clock of its own: it isn't waited for
    done, wanted = 0, steps
    while done < wanted:
        spans = yield
        done += 1
        profile.step_s.append(sum(spans.values()))
        for kind, s in spans.items():
            profile.spans_s.setdefault(kind, []).append(s)
        profile.restarts += [done - 1] if hooks.restarts else []
        marks.append(hooks.mark())
        backwards.append(hooks.backwards), samples.append(hooks.samples), graphs.append(_compat.compiled_graphs())
        profile.micro_batches, profile.samples = statistics.fmean(backwards), statistics.fmean(samples) or None
        profile.lines = hooks.noted_lines(done)
        profile.cost["calls"] = hooks.spans.calls / done
        if done == steps:
            more = max(ranks.each_says(_more_events(profile)))
            wanted += min(ranks.each_says(min(more, _that_last(profile, extra_s))))
    hooks.recording, hooks.synchronised = False, True
    if marks[0] is not None:
        hooks.synchronise()
        profile.step_s = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
        profile.device_s = {kind: [s / wanted] for kind, s in hooks.device_seconds().items()}
    profile.training["exchanges"] = hooks.exchanges / wanted
    made = [after - before for before, after in itertools.pairwise(graphs)]
    profile.compiles |= {"in_steps": sum(made), "at": [i for i, n in enumerate(made) if n]}
    profile.rare = rare_kinds(profile)


def _more_events(profile: Profile) -> int:
    """Further steps after which each rare thing that costs much has been seen EVENTS times; 0 if there is none."""
    rare = [profile.spans_s[kind] for kind in rare_kinds(profile)]
    rare += [[s * (i in profile.restarts) for i, s in enumerate(profile.spans_s["data"])]] if profile.restarts else []
    dear = [of for of in rare if sum(of) > COSTLY * sum(profile.step_s)]
    seen = [sum(s > 0 for s in of) for of in dear]
    return max((math.ceil((EVENTS - n) * len(profile.step_s) / n) for n in seen if n < EVENTS), default=0)


def _that_last(profile: Profile, seconds: float) -> int:
    return int(seconds / statistics.fmean(profile.step_s))


class _Interleaved:
    """Rounds of turns, within a time."""

    def __init__(self, hooks: Hooks, profile: Profile, ranks: Ranks, seconds: float) -> None:
        self.hooks, self.profile, self.ranks = hooks, profile, ranks
        self.ends, self.seconds = time.perf_counter() + seconds, seconds
        self.snapshot: StateSnapshot | None = None  # Copies, as long as they are those of the last step as it is
        self.found: ScriptObjects | None = None
        self.fastest_s: dict[str, list[float]] = {}  # By name: the fastest step of each turn
        self.step_s, self.steps, self.settle, self.drain = json.loads(ranks.first_says(json.dumps(self._lengths())))

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

    def all(self, modes: Sequence[Mode | Trial]) -> Steps:
        """Those that can be tried: first all that are harmless together, then one after the other."""
        tried = self._that_can(modes)
        trials = [mode for mode in tried if hasattr(mode, "measure")]
        safe = [mode for mode in tried if mode not in trials and not mode.risky]
        risky = [[mode] for mode in tried if mode not in trials and mode.risky]
        trial_s = TRIAL_SHARE * self.seconds
        self.ends -= trial_s * len(trials)
        stages = self._that_fit([safe] * bool(safe) + risky, 1 - TRIAL_SHARE * len(trials))
        for number, stage in enumerate(stages):
            weight = [self._round_steps(of) for of in stages[number:]]
            left = self.ends - time.perf_counter()
            yield from self._stage(stage, left * weight[0] / sum(weight))
        for trial in trials:
            self.profile.trying = trial.name
            yield from self._steps_as_they_are(1)
            self._keep()
            with self.hooks.aside(), self.hooks.unobserved():
                trial.measure(self.hooks, self.profile, trial_s)
            self.snapshot.restore()  # random state: a sampler draws from it
            self.profile.trying = ""

    def _that_can(self, modes: Sequence[Mode | Trial]) -> list[Mode | Trial]:
        """On all ranks."""
        reasons = {mode.name: why for mode in modes if (why := mode.why_not(self.hooks, self.profile))}
        self.profile.gone += [name for name, why in reasons.items() if isinstance(why, Gone)]
        if not StateSnapshot.room(self.hooks, self.profile.local_ranks):
            mine = "no memory is left for copies of model and optimizer, to put them back after it"
            reasons |= {
                mode.name: mine for mode in modes if getattr(mode, "needs_restore", False) and mode.name not in reasons
            }
        for of_rank in self.ranks.each_says(reasons):
            self.profile.not_tried |= of_rank | self.profile.not_tried
        return [mode for mode in modes if mode.name not in self.profile.not_tried]

    def _round_steps(self, stage: Sequence[Mode]) -> int:
        """In one round."""
        turns = sum(mode.settle + self.settle + self.steps for mode in stage) + self.settle + self.steps
        return turns + self.drain * any(mode.name == "same batch again" for mode in stage)

    def _that_fit(self, stages: list[list[Mode]], share: float) -> list[list[Mode]]:
        """Within the time, with rounds enough for an interval: others are left out, the last ones first.

        `share`: of all seconds, those for turns.
        """
        have = float(self.ranks.first_says(str(self.ends - time.perf_counter())))
        given = self.seconds if self.profile.seconds is None else self.profile.seconds
        while stages and (need := LEAST_ROUNDS * self.step_s * sum(map(self._round_steps, stages))) > have:
            mode = stages[-1].pop()
            enough = math.ceil(given + SPARE * (need - have) / share)  # this one and all before it have their rounds
            self.profile.left_out[mode.name] = f"{given:g} s are too short for it: --seconds {enough}"
            stages = [stage for stage in stages if stage]
        return stages

    def _stage(self, modes: list[Mode], seconds: float) -> Steps:
        ends = time.perf_counter() + seconds
        by_name = {mode.name: mode for mode in modes}
        self.profile.trying = modes[0].name if modes[0].risky else ""
        for mode in modes:
            self.profile.samples_factor[mode.name] = mode.samples_factor
        draw, done, round_s = random.Random(0), 0, 0.0
        if self.profile.trying:
            yield from self._steps_as_they_are(1)  # the profile is saved before it, with what is tried
        while True:
            order = draw.sample([AS_IS, *by_name], len(by_name) + 1)
            enough = done >= MOST_ROUNDS or (done >= LEAST_ROUNDS and time.perf_counter() + round_s > ends)
            enough = enough or (done >= NARROW_ROUNDS and self._all_narrow(by_name))
            order = json.loads(self.ranks.first_says(json.dumps([] if enough or not by_name else order)))
            if not order:
                break
            begun = time.perf_counter()
            turns: dict[str, list[float]] = {}
            for name in order:
                yield from self._turn(by_name.get(name), turns.setdefault(name, []))
            self._note(turns)
            round_s = time.perf_counter() - begun
            done += 1
            slow = self._too_slow(by_name, done, (ends - time.perf_counter()) / round_s)
            for name in json.loads(self.ranks.first_says(json.dumps(slow))):
                times = self.profile.interleaved_s.pop(name)[-1][0] / turns[AS_IS][0]
                self.profile.not_tried[name] = f"its step took {times:.0f} times as long: not looked at any further"
                del by_name[name]
        self.profile.trying = ""

    def _turn(self, mode: Mode | None, counted: list[float]) -> Steps:
        """`counted`: gets the mean step."""
        self.ranks.wait()  # one that is behind would slow down this turn's first step on others
        hooks, spans, starts = self.hooks, [], []
        with self._entered(mode):
            hooks.synchronised = False  # between these steps a GPU is not waited for, as in the script itself
            try:
                for _ in range((mode.settle if mode else 0) + self.settle):
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
        steps = self._seconds(spans, marks)
        # Steps that begin an epoch count only if most of them do
        usual = [s for s, start in zip(steps, starts, strict=True) if not start]
        counted.append(statistics.fmean(usual if 2 * len(usual) >= len(steps) else steps))
        self.fastest_s.setdefault(mode.name if mode else AS_IS, []).append(min(steps))
        if mode is None:
            usage.each_round(hooks, self.profile)
        elif mode.name == "same batch again":
            yield from self._steps_as_they_are(self.drain)

    def _seconds(self, spans: list[dict[str, float]], marks: list[Any]) -> list[float]:
        """Of each step of a turn, without what is rare.

        From mark to mark by a GPU's own clock: the host runs ahead of it, and what it does meanwhile is in no step.
        """
        rare = [sum(s for kind, s in of.items() if kind in self.profile.rare) for of in spans]
        if marks[0] is None:
            took = [sum(of.values()) for of in spans]
        else:
            took = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
        return [max(0.0, s - r) for s, r in zip(took, rare, strict=True)]

    def _note(self, turns: dict[str, list[float]]) -> None:
        """One list for each mode that was ever tried, so that those of one round stand at one place."""
        rounds = len(self.profile.interleaved_s.setdefault(AS_IS, []))
        for name in (*turns, *self.profile.interleaved_s):
            self.profile.interleaved_s.setdefault(name, [[] for _ in range(rounds)])
        for name, of in self.profile.interleaved_s.items():
            of.append(turns.get(name, []))

    def _too_slow(self, names: Iterable[str], done: int, fit: float) -> list[str]:
        """Those without which more rounds fit, where so many still do."""
        over = fit < 1
        if not 2 <= done < (LEAST_ROUNDS if over else MOST_ROUNDS) or fit >= MOST_ROUNDS - done:
            return []
        factor = SLOWER if over else MUCH_SLOWER
        as_is = [of[0] for of in self.profile.interleaved_s[AS_IS][-2:]]
        return [
            name for name in names if all(s > factor * a for s, a in zip(self.fastest_s[name][-2:], as_is, strict=True))
        ]

    def _all_narrow(self, names: Iterable[str]) -> bool:
        """Whether further rounds would tell little more, by this rank's clock."""
        from labs.doctor import estimated_gain  # imported late: before the script has torch it would import it

        found = [estimated_gain.interleaved([self.profile], name) for name in names]
        return all(bound is not None and bound.high <= NARROW * bound.low for bound in found)

    def _steps_as_they_are(self, steps: int) -> Steps:
        for _ in range(steps):
            self.snapshot = None
            yield

    def _keep(self) -> None:
        if self.snapshot is None:
            self.found = self.found or ScriptObjects(self.hooks)
            self.snapshot = StateSnapshot(self.hooks, self.found)

    @contextmanager
    def _entered(self, mode: Mode | None) -> Iterator[None]:
        if mode is None:
            self.snapshot = None
            yield
            return
        if not mode.needs_restore:
            self.snapshot = None
        else:
            self._keep()
        with self.hooks.unobserved():
            mode.enter(self.hooks)
            try:
                yield
            finally:
                mode.leave(self.hooks)
                if mode.needs_restore:
                    self.snapshot.restore()


def price_of_a_call(calls: int = 2_000) -> float:
    """Seconds of the processor that a call takes longer here if it is timed and its line is noted.

    One within a step costs more: it finds the processor's caches full of other things.
    """
    hooks = Hooks(os.path.dirname(__file__), lambda spans: None)
    hooks.torch, hooks.recording = sys.modules["torch"], True
    hooks._own[price_of_a_call.__code__.co_filename] = True  # as if it were the script
    noted = hooks._noted("rest", abs)
    begun = time.thread_time()  # what other programs take meanwhile is none of its cost
    for _ in range(calls):
        noted(1)
    return (time.thread_time() - begun) / calls
