"""Where to cut a chain: the cost of any cut, and the best one. Pure functions; profiling.py measures their input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise

from labs.kit.errors import require
from labs.parts.pipelines import schedules


@dataclass(frozen=True)
class Costs:
    """What one micro-batch costs: seconds per layer, and seconds per message over the cut before each layer."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """The last layer's include the loss."""
    message_s: tuple[float, ...]
    """Of the sender's time, and again of the receiver's; `message_s[c]` is that of a cut before layer c, [0] unused."""

    def stage_s(self, first: int, end: int) -> float:
        """Seconds of a stage with the layers from `first` to before `end`: computing, and all messages it shares in.

        A message each way over each of its cuts: an activation and its gradient, as many bytes.
        """
        computing = sum(self.forward_s[first:end]) + sum(self.backward_s[first:end])
        cuts = [c for c in (first, end) if 0 < c < len(self.forward_s)]
        return computing + 2 * sum(self.message_s[c] for c in cuts)


def choose(costs: Costs, stages: int) -> list[int]:
    """The cuts that make the slowest stage as fast as can be: every further micro-batch waits for that one.

    Dynamic programming over "the best cut of the layers from here into k stages": layers^2 x stages steps.
    BadInput for more stages than layers.
    """
    layers = len(costs.forward_s)
    require(1 <= stages <= layers, f"{layers} layers are not enough for {stages} stages: use at most {layers} ranks")

    @cache
    def best(first: int, k: int) -> tuple[float, tuple[int, ...]]:
        if k == 1:
            return costs.stage_s(first, layers), ()
        found = []
        for end in range(first + 1, layers - k + 2):
            rest, cuts = best(end, k - 1)
            found.append((max(costs.stage_s(first, end), rest), (end, *cuts)))
        return min(found)

    return list(best(0, stages)[1])


def predict_step_s(costs: Costs, cuts: Sequence[int], micro_batches: int, schedule: schedules.Schedule) -> float:
    """Seconds of a step with these cuts: the schedule played through with the profiled times."""
    stages = list(pairwise([0, *cuts, len(costs.forward_s)]))
    forward, backward = ([sum(part[a:b]) for a, b in stages] for part in (costs.forward_s, costs.backward_s))
    events = schedules.simulate(schedule, micro_batches, forward, backward, [costs.message_s[c] for c in cuts])
    return schedules.span_s(events)


def candidates(layers: int, stages: int, chosen: Sequence[int], most: int = 16) -> list[list[int]]:
    """Cuts worth measuring: all there are, or, where these are more than `most`, the chosen ones and their neighbours.

    A neighbour has one of the cuts moved by one layer.
    """
    every = [list(c) for c in combinations(range(1, layers), stages - 1)]
    if len(every) <= most:
        return every
    moved = [[*chosen[:k], c + d, *chosen[k + 1 :]] for k, c in enumerate(chosen) for d in (-1, 1)]
    return [list(chosen), *(cuts for cuts in moved if cuts in every)]
