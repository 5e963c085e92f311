"""What a training step allocates and frees, in order, and what is alive at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["before", "forward", "backward", "optimizer"]

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporaries", "inputs/buffers")


@dataclass(frozen=True)
class Event:
    """A block of memory is allocated or freed."""

    step: int
    """Number of the operation in the training step; one operation may have several events. 0: existed before."""
    op: str
    """The latest operation, for instance "mm"; "" in a "before" event."""
    phase: Phase
    change_bytes: int
    """Positive: allocated; negative: freed."""
    category: str
    """One of CATEGORIES; a block keeps its category from its first to its last event."""


@dataclass(frozen=True)
class Trace:
    """One training step: each block that it allocates and frees.

    parameters, gradients, optimizer  as named; a gradient from the operation that computes it
    activations     alive at the end of a forward pass, or of its second run in backward: what autograd keeps,
                    including autocast's copies of weights, and the model's output and loss
    temporaries     everything else: freed in the forward pass that made it, gradients of activations, the
                    optimizer's intermediate results
    inputs/buffers  the batch, and buffers of the model
    """

    events: tuple[Event, ...]
    rows: int
    model: str = ""
    conditions: dict[str, object] = field(default_factory=dict)
    """Keywords of `step`: optimizer, precision, policy, and so on."""

    def timeline(self, category: str | None = None) -> list[int]:
        """Return the bytes alive after each event, of one category or of all together."""
        total, found = 0, []
        for e in self.events:
            total += e.change_bytes if category in (None, e.category) else 0
            found.append(total)
        return found

    @property
    def peak_at(self) -> int:
        """Index of the event after which the most bytes are alive, the first of several."""
        total = self.timeline()
        return max(range(len(total)), key=total.__getitem__)

    @property
    def peak_event(self) -> Event:
        """The allocation that makes the peak; its operation and phase say where in the step it is."""
        return self.events[self.peak_at]

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by CATEGORIES at the moment of the largest total."""
        found = dict.fromkeys(CATEGORIES, 0)
        for e in self.events[: self.peak_at + 1]:
            found[e.category] += e.change_bytes
        return found

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once: what must fit."""
        return sum(self.peak.values())

    @property
    def steps(self) -> int:
        """Number of operations."""
        return self.events[-1].step

    def curve(self, points: int = 200) -> Iterator[tuple[int, Phase, dict[str, int]]]:
        """Yield (operation, phase, bytes by category) at up to `points` moments, the fullest of each interval."""
        width = max(1, -(-(self.steps + 1) // points))
        now, best, most = dict.fromkeys(CATEGORIES, 0), None, -1
        for i, e in enumerate(self.events):
            now[e.category] += e.change_bytes
            if e.phase != "before" and (total := sum(now.values())) > most:
                best, most = (e.step, e.phase, dict(now)), total
            last = i + 1 == len(self.events)
            if best and (last or self.events[i + 1].step // width > e.step // width):
                yield best
                best, most = None, -1
