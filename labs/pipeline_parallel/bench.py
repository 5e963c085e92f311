"""Ways to train a chain, ready to be timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from labs.common.pipelines.chains import Chain
from labs.common.pipelines.engine import Pipeline
from labs.common.pipelines.schedules import SCHEDULES, Action, Event, gpipe, with_idle
from labs.kit import measure
from labs.kit.rank import Rank

Step = Callable[[], object]


def actions(schedule: str, micro_batches: int, rank: Rank) -> list[Action]:
    """This rank's part of a schedule; "naive" is any of them with one micro-batch."""
    return SCHEDULES.get(schedule, gpipe)(rank.rank, rank.world_size, micro_batches)


def trainer(module: nn.Module, gradients: Step) -> Step:
    """A training step: `gradients()` runs forward and backward, plain SGD does the rest."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        gradients()
        optimizer.step()

    return step


def whole(model: Chain, x: Tensor, y: Tensor, device: torch.device) -> Step:
    """The whole model and batch on one device."""
    module = model.module().to(device)
    return trainer(module, lambda: model.loss(module(x), y).backward())


class Traced:
    """Steps of one pipeline with several schedules, and what this rank's stage did in each step."""

    def __init__(self, pipeline: Pipeline, x: Tensor, y: Tensor, rank: Rank) -> None:
        self.pipeline, self.x, self.y, self.rank = pipeline, x, y, rank
        self.trains = trainer(pipeline.module, self._run)
        self.events: dict[tuple[str, int], list[list[Event]]] = {}
        # Taking the time of every action costs a CPU a thousandth, but makes a GPU wait for each.
        self.always = rank.device.type == "cpu"

    def step(self, schedule: str, micro_batches: int) -> Step:
        """A training step with that schedule."""
        parts = (actions(schedule, micro_batches, self.rank), self.x.chunk(micro_batches), self.y.chunk(micro_batches))

        def step() -> None:
            self.parts, self.pipeline.events = parts, [] if self.always else None
            self.trains()
            if self.always:
                self.events.setdefault((schedule, micro_batches), []).append(self.pipeline.events)

        return step

    def _run(self) -> None:
        self.pipeline.step(*self.parts)

    def timelines(self, schedule: str, micro_batches: int) -> list[list[Event]]:
        """The events of all stages, idle times among them, one list per step since the last `clear`."""
        if not self.always:
            self.always, step = True, self.step(schedule, micro_batches)
            measure.time_steps(step, 2, self.rank.device)
            self.always = False
        steps = zip(*self.rank.gather(self.events[schedule, micro_batches]), strict=True)
        return [with_idle([e for events in step for e in events], self.rank.world_size) for step in steps]

    def clear(self) -> None:
        """Forget all events so far: those of the warm-up."""
        self.events.clear()


def in_turn(
    steps: Mapping[tuple, Step],
    rounds: int | measure.Budget,
    rank: Rank,
    clear: Step = lambda: None,
    optional: Sequence[tuple] = (),
) -> dict[tuple, list[float]]:
    """Each step once to warm up, then `clear()`, then rounds: seconds of the slowest rank, per step.

    Where the fewest rounds of all steps would take longer than a Budget, those of `optional` are left out, the first
    ones first, and are not in the result.
    """
    once = {}
    for name, step in steps.items():
        rank.barrier()
        once |= dict(zip([name], rank.slowest(measure.time_steps(step, 1, rank.device)), strict=True))
    clear()
    if isinstance(rounds, measure.Budget):
        for name in optional:
            if rounds.least * sum(once.values()) > rounds.seconds:
                del once[name]
    steps = {name: steps[name] for name in once}
    seconds = measure.interleave(
        steps,
        rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    return {name: rank.slowest(samples) for name, samples in seconds.items()}


def typical(steps: Sequence[Sequence[Event]]) -> Sequence[Event]:
    """The step of median duration: the one to draw."""
    spans = sorted(steps, key=lambda events: max(e.end_s for e in events) - min(e.start_s for e in events))
    return spans[(len(spans) - 1) // 2]
