"""The folklore against fragmentation, put to the simulated allocator: what it reserves, what it asks of the driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labs.parts.remedies.blocks import MIB
from labs.parts.remedies.caching_allocator import CachingAllocator, OutOfMemory, Stats
from labs.parts.remedies.expandable_segments import ExpandableSegments
from labs.parts.remedies.requests import LONGEST, Replay, Run, slivers

PLAIN, EACH, EXPANDABLE = "as it is", "empty_cache after each step", "expandable segments"
SPLIT = "max_split_size_mb:64"
WARM_UP = 0.5  # share of the steps after which new calls of cudaMalloc count as lasting


@dataclass(frozen=True)
class Way:
    """How a run uses its allocator."""

    allocator: Callable[[float], CachingAllocator] = CachingAllocator
    """Makes one for a device of so many bytes."""
    empty_every: int = 0
    """Steps between two calls of empty_cache; 0: never."""
    order: Callable[[Sequence[int]], list[int]] = list
    """What the run does with the lengths of its batches."""


WAYS: dict[str, Way] = {
    PLAIN: Way(),
    EACH: Way(empty_every=1),
    "empty_cache after 10 steps": Way(empty_every=10),
    SPLIT: Way(lambda capacity: CachingAllocator(capacity, 64 * MIB)),
    "longest batch first": Way(order=lambda lengths: [max(lengths), *lengths]),
    "padded to the longest": Way(order=lambda lengths: [LONGEST] * len(lengths)),
    EXPANDABLE: Way(ExpandableSegments),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    stats: Stats
    steps: int
    """Steps that were done before the end, or before memory ran out."""
    fits: bool
    lasting_allocs: float
    """Calls of cudaMalloc per step in the second half of the run: what is left when the cache has filled."""


def train(run: Run, lengths: Sequence[int], way: Way, capacity_bytes: float = math.inf) -> Outcome:
    """A run of steps with these lengths on a simulated device of `capacity_bytes`."""
    allocator, calls = way.allocator(capacity_bytes), []
    replay = Replay(allocator)
    try:
        replay.feed(run.resident)
        for i, length in enumerate(way.order(lengths), start=1):
            replay.feed(run.steps[length])
            if way.empty_every and i % way.empty_every == 0:
                allocator.empty_cache()
            calls.append(allocator.stats.num_device_alloc)
        fits = True
    except OutOfMemory:
        fits = False
    half = calls[int(WARM_UP * len(calls)) :]
    return Outcome(allocator.stats, len(calls), fits, (half[-1] - half[0]) / max(1, len(half) - 1) if half else 0.0)


@dataclass(frozen=True)
class Pattern:
    """The outcome of the fragmenting pattern."""

    stats: Stats
    fits: bool


LATE, BETWEEN = "empty_cache when it is late", "empty_cache in time"
PATTERN_WAYS = (PLAIN, LATE, BETWEEN, EXPANDABLE)


def fragment(way: str, count: int, large_bytes: int, small_bytes: int, capacity_bytes: float) -> Pattern:
    """Replay `slivers` in one of PATTERN_WAYS: the cache is emptied after the smaller tensors came, or in time."""
    allocator = (ExpandableSegments if way == EXPANDABLE else CachingAllocator)(capacity_bytes)
    replay, parts = Replay(allocator), slivers(count, large_bytes, small_bytes)
    try:
        replay.feed(parts[0])
        if way == BETWEEN:
            allocator.empty_cache()
        replay.feed(parts[1])
        if way == LATE:
            allocator.empty_cache()
        replay.feed(parts[2])
        return Pattern(allocator.stats, True)
    except OutOfMemory:
        return Pattern(allocator.stats, False)
