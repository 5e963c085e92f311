"""Which step is taken how: some to warm up, some as they are, then counterfactuals in turn with steps as they are.

A counterfactual's steps stand beside steps as they are in each round, so that a noisy machine decides nothing. Before
each of its turns model, optimizer and random state are copied, and put back after it: what the script trains goes on
from steps as they are alone. All ranks do the same in the same step; rank 0 says how many rounds there are.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from labs.parts.doctor.facts import AS_IS, Facts
from labs.parts.doctor.hooks import Hooks

WARM_UP = 5
MOST_WARM_UP = 40
"""While torch.compile goes on compiling."""
LEAST_ROUNDS, MOST_ROUNDS = 6, 20
STEPS_PER_TURN = 2
STORE_KEY = "labs.doctor/rounds"
Steps = Generator[None, dict[str, float], None]
"""Takes the next step, and is sent its seconds by kind."""


class Mode(Protocol):
    """A counterfactual: what a step would take if one thing were otherwise. An upper bound of what its cure gives."""

    name: str
    settle: int
    """Steps after its start that are not counted."""
    samples_factor: float
    """Samples in one of its steps, in those of a step as it is."""
    needs_restore: bool
    """Whether its steps leave something else in model or optimizer than a step as it is would."""

    def why_not(self, hooks: Hooks, facts: Facts) -> str:
        """Why it cannot be tried or would show nothing; "" if it can."""

    def enter(self, hooks: Hooks) -> None:
        """Until `leave`."""

    def leave(self, hooks: Hooks) -> None:
        """As it was before."""


def plan(hooks: Hooks, facts: Facts, steps: int, seconds: float, modes: Sequence[Mode]) -> Steps:
    """All steps that are wanted, noted in `facts`. Ends when they are done."""
    facts.stage = "warm-up"
    yield from _warm_up(hooks, facts)
    facts.stage = "as it is"
    yield from _as_it_is(hooks, facts, steps)
    facts.stage = "in turn"
    yield from _in_turn(hooks, facts, seconds, modes)
    facts.stage = "done"


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


def _warm_up(hooks: Hooks, facts: Facts) -> Steps:
    graphs, quiet = -1, 0
    for _ in range(MOST_WARM_UP):
        yield
        quiet = quiet + 1 if compiled_graphs() == graphs and hooks.called else 0
        graphs = compiled_graphs()
        if quiet >= WARM_UP - 1:
            return


def _as_it_is(hooks: Hooks, facts: Facts, steps: int) -> Steps:
    """Where their time goes. What is noted for each line is that of these steps."""
    hooks.recording, hooks.spans.calls, graphs = True, 0, compiled_graphs()
    for done in range(1, steps + 1):
        spans = yield
        facts.step_s.append(sum(spans.values()))
        for kind, s in spans.items():
            facts.spans_s.setdefault(kind, []).append(s)
        for kind, s in hooks.device_seconds().items():
            facts.device_s.setdefault(kind, []).append(s)
        facts.micro_batches, facts.samples = float(hooks.backwards), float(hooks.samples) or None
        facts.lines = hooks.noted_lines(done)
        facts.cost["calls"] = hooks.spans.calls / done
    facts.compiles["in_steps"] = compiled_graphs() - graphs
    hooks.recording = False


def _in_turn(hooks: Hooks, facts: Facts, seconds: float, modes: Sequence[Mode]) -> Steps:
    tried = []
    for mode in modes:
        if why := mode.why_not(hooks, facts):
            facts.not_tried[mode.name] = why
        else:
            tried.append(mode)
            facts.samples_factor[mode.name] = mode.samples_factor
    if not tried:
        return
    drain = _batches_ahead(facts)
    step_s = statistics.median(facts.step_s)
    round_steps = drain + STEPS_PER_TURN + sum(m.settle + STEPS_PER_TURN for m in tried)
    rounds = agreed(min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / (round_steps * step_s)))))
    draw = random.Random(0)  # the same order on all ranks
    for _ in range(rounds):
        for mode in draw.sample([None, *tried], len(tried) + 1):
            name = mode.name if mode else AS_IS
            counted: list[float] = []
            facts.turns_s.setdefault(name, []).append(counted)
            with _entered(mode, hooks):
                for number in range((mode.settle if mode else drain) + STEPS_PER_TURN):
                    spans = yield
                    if number >= (mode.settle if mode else drain):
                        counted.append(sum(spans.values()))


def _batches_ahead(facts: Facts) -> int:
    """Batches that workers have ready after a turn that took none: what a step as it is must first use up."""
    return 1 + (facts.loader.workers * facts.loader.prefetch if facts.loader else 0)


@contextmanager
def _entered(mode: Mode | None, hooks: Hooks) -> Iterator[None]:
    if mode is None:
        yield
        return
    kept = Kept(hooks) if mode.needs_restore else None
    mode.enter(hooks)
    try:
        yield
    finally:
        mode.leave(hooks)
        if kept:
            kept.restore()


class Kept:
    """Copies of parameters, buffers, optimizer state and random state."""

    def __init__(self, hooks: Hooks) -> None:
        torch = hooks.torch
        self.torch, self.optimizers = torch, list(hooks.optimizers.values())
        tensors = {id(t): t for root in hooks.roots.values() for t in (*root.parameters(), *root.buffers())}
        states = [t for o in self.optimizers for s in o.state.values() for t in s.values() if torch.is_tensor(t)]
        self.tensors = [*tensors.values(), *{id(t): t for t in states}.values()]
        with torch.no_grad():
            self.copies = [t.detach().clone() for t in self.tensors]
        self.numbers = [
            (s, k, v) for o in self.optimizers for s in o.state.values() for k, v in s.items() if not torch.is_tensor(v)
        ]
        self.random, self.torch_random = random.getstate(), torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """In place, so that whoever holds a tensor sees it, too."""
        with self.torch.no_grad():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.detach().copy_(copy)
        for state, key, value in self.numbers:
            state[key] = value
        random.setstate(self.random)
        self.torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            self.torch.cuda.set_rng_state_all(self.cuda_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)


def agreed(rounds: int) -> int:
    """Rank 0's number, on all ranks."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rounds
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set(STORE_KEY, str(rounds))
    return int(store.get(STORE_KEY))


def price_of_a_call(calls: int = 2_000) -> float:
    """Seconds that entering and leaving a span takes here."""
    from labs.parts.doctor.hooks import Spans

    spans = Spans()
    begun = time.perf_counter()
    for _ in range(calls):
        spans.enter("rest")
        spans.leave()
    return (time.perf_counter() - begun) / calls
