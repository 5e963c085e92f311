"""Traces of several ranks on one clock: what their collectives say of the difference of two machines' clocks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from labs.common.profiling.intervals import Span, minus, union
from labs.common.profiling.traces import Collective, RankTrace
from labs.kit.errors import BadInput, require

LANES = ("data", "forward", "backward", "all-reduce", "wait", "optimizer")
COMMON_S = 1e-3  # traces of one machine may differ so much and count as one clock: each process calibrates its own
GAP_S = 2e-4  # between two operators: Python, and the profiler's own notes, not a wait
How = Literal["reference", "one machine", "collectives", "not known"]


@dataclass(frozen=True)
class Offset:
    """By how much a rank's clock is ahead of the reference rank's, in s."""

    rank: int
    s: float
    low: float
    """It cannot be less: some collective would have ended on the other rank before this one began."""
    high: float
    """It cannot be more."""
    spread: float
    """Half of the width of the shorter half of what single collectives say, or of what is certain, if that is less."""
    collectives: int
    how: How

    def __str__(self) -> str:
        if self.how == "reference":
            return f"rank {self.rank}: the reference"
        if self.how == "not known":
            return f"rank {self.rank}: not known, no collective is in both traces; drawn as its clock has it"
        seen = f"its {self.collectives} collectives say {1e3 * self.seen:+.2f} ms (± {1e3 * self.spread:.2f})"
        bounds = f"between {1e3 * self.low:+.2f} and {1e3 * self.high:+.2f} ms is certain"
        if self.how == "one machine":
            return f"rank {self.rank}: taken as 0, the machine's clock is common; {seen}, {bounds}"
        return f"rank {self.rank}: {1e3 * self.s:+.2f} ms ahead; {seen}, {bounds}"

    seen: float = 0.0
    """What the collectives say, also where the machine's clock is trusted."""

    @property
    def doubt_s(self) -> float:
        """By how much the offset that is taken may be wrong: each process sets its trace's clock by itself."""
        return 0.0 if self.how == "reference" else abs(self.seen - self.s) + self.spread


def offset_of(reference: RankTrace, other: RankTrace) -> Offset:
    """How far the clock of `other` is ahead of the reference's, from the collectives that both took part in.

    A collective of the kind that all wait for ends on all ranks nearly at once: the difference of its two ends is the
    offset, and half of what many say lies closest together. None can end before the last rank has begun, which bounds
    the offset on both sides. Two traces of one machine share its clock, unless their collectives say otherwise.
    """
    pairs = list(matched([reference, other]))
    if not pairs:
        return Offset(other.rank, 0.0, -np.inf, np.inf, np.inf, 0, "not known")
    pairs = consistent(pairs)
    low = max(b.start - a.end for a, b in pairs)
    high = min(b.end - a.start for a, b in pairs)
    if low > high:
        raise BadInput(
            f"{other.path} and {reference.path} contradict each other: in no order of two clocks can their "
            "collectives be the same ones. Give traces of one run, with the same steps"
        )
    seen, spread = shorter_half([b.end - a.end for a, b in pairs])
    seen, spread = min(max(seen, low), high), min(spread, (high - low) / 2)
    alike = bool(reference.host) and reference.host == other.host
    if alike and low <= COMMON_S and high >= -COMMON_S and abs(seen) <= max(COMMON_S, 3 * spread):
        return Offset(other.rank, 0.0, low, high, spread, len(pairs), "one machine", seen)
    return Offset(other.rank, seen, low, high, spread, len(pairs), "collectives", seen)


STRAY_SHARE = 0.1  # of the pairs


def consistent(pairs: Sequence[tuple[Collective, ...]]) -> list[tuple[Collective, ...]]:
    """`pairs` without the few that contradict the rest, at most STRAY_SHARE of them.

    Where cores are scarce gloo's two threads may note two collectives in one order on this rank and in another on that.
    """
    kept, spare = list(pairs), int(STRAY_SHARE * len(pairs))
    middle, _ = shorter_half([b.end - a.end for a, b in kept])
    for _ in range(spare):
        least = max(kept, key=lambda p: p[1].start - p[0].end)
        most = min(kept, key=lambda p: p[1].end - p[0].start)
        low, high = least[1].start - least[0].end, most[1].end - most[0].start
        if low <= high:
            break
        kept.remove(least if low - middle > middle - high else most)
    return kept


def shorter_half(samples: Sequence[float]) -> tuple[float, float]:
    """(middle, half the width) of the narrowest range that holds half of `samples`: late ends do not move it."""
    x = np.sort(np.asarray(samples, float))
    n = len(x) // 2 + 1
    widths = x[n - 1 :] - x[: len(x) - n + 1]
    first = int(np.argmin(widths))
    return float(np.median(x[first : first + n])), float(widths[first]) / 2


def matched(traces: Sequence[RankTrace]) -> Iterator[tuple[Collective, ...]]:
    """The collectives that hold all ranks up and that all of `traces` have, one of each.

    Those of groups to which only some of these ranks belong are left out. The k-th of one rank is the k-th of another,
    if both called the same ones in the same order. Otherwise the same is asked of each step of the profiler; a step in
    which they differ is left out.
    """
    all_have = set.intersection(*({c.group for c in t.collectives} for t in traces))
    every = [[c for c in t.collectives if c.all_wait and c.group in all_have] for t in traces]
    if _alike(every):
        yield from zip(*every, strict=True)
        return
    by_step = [defaultdict(list) for _ in traces]
    for found, ones in zip(by_step, every, strict=True):
        for c in ones:
            found[c.step].append(c)
    for step in by_step[0]:
        of_step = [found[step] for found in by_step]
        if step is not None and _alike(of_step):
            yield from zip(*of_step, strict=True)


def _alike(every: Sequence[Sequence[Collective]]) -> bool:
    return len({tuple((c.name, c.group) for c in ones) for ones in every}) == 1


@dataclass(frozen=True)
class Arrival:
    """One collective of all ranks: how many s after the first rank each one came to it."""

    step: int | None
    name: str
    late_s: tuple[float, ...]
    """In the order of the ranks."""
    end: float
    """When it ended on the last rank, in s on the reference's clock."""

    @property
    def last(self) -> int:
        """Place, in the order of the ranks, of the one that came last."""
        return max(range(len(self.late_s)), key=self.late_s.__getitem__)

    @property
    def before_last(self) -> int:
        """Place of the one that came before the last."""
        return sorted(range(len(self.late_s)), key=self.late_s.__getitem__)[-2]

    @property
    def by_s(self) -> float:
        """How much later it came than the one before it: what all would save if it came with that one."""
        return float(np.diff(sorted(self.late_s))[-1])


@dataclass(frozen=True)
class Merged:
    """Traces of several ranks, in the order of the ranks, and each one's clock."""

    traces: tuple[RankTrace, ...]
    offsets: tuple[Offset, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Which ranks there are."""
        return tuple(t.rank for t in self.traces)

    @cached_property
    def start(self) -> float:
        """First moment of any trace, in s on the reference's clock."""
        return min(t.span[0] - o.s for t, o in zip(self.traces, self.offsets, strict=True))

    @cached_property
    def lanes(self) -> tuple[dict[str, list[Span]], ...]:
        """For each rank {lane: spans}, in s since `start`."""
        found = []
        for trace, offset in zip(self.traces, self.offsets, strict=True):
            shift = offset.s + self.start
            found.append({lane: [(a - shift, b - shift) for a, b in spans] for lane, spans in lanes_of(trace).items()})
        return tuple(found)

    @cached_property
    def steps(self) -> tuple[dict[int, Span], ...]:
        """For each rank {number: (start, end)} of the profiler's steps, in s since `start`."""
        return tuple(
            {n: (a - o.s - self.start, b - o.s - self.start) for n, (a, b) in t.steps.items()}
            for t, o in zip(self.traces, self.offsets, strict=True)
        )

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """Who came when to each collective that all ranks took part in; none for a single rank."""
        if len(self.traces) < 2:
            return []
        found = []
        for every in matched(self.traces):
            came = [c.called - o.s for c, o in zip(every, self.offsets, strict=True)]
            end = max(c.end - o.s for c, o in zip(every, self.offsets, strict=True))
            found.append(Arrival(every[0].step, every[0].name, tuple(t - min(came) for t in came), end - self.start))
        return found

    @cached_property
    def last_arrivals(self) -> list[Arrival]:
        """Of each step, the collective that ended last: what the optimizer waits for. All, where steps are unknown."""
        by_step: dict[int, Arrival] = {}
        for arrival in self.arrivals:
            if arrival.step is not None:
                by_step[arrival.step] = arrival
        return list(by_step.values()) or self.arrivals

    @property
    def late_s(self) -> tuple[float, ...]:
        """For each rank the median s by which it came after the first one to the last collective of a step."""
        every = zip(*(a.late_s for a in self.last_arrivals), strict=True)
        return tuple(statistics.median(late) for late in every)


def lanes_of(trace: RankTrace) -> dict[str, list[Span]]:
    """What is drawn of a rank, on its own clock. It waits where a collective is under way and nothing computes.

    On a GPU what computes are kernels and copies. On a CPU it is the operators, and a gap of 0.2 ms between two is no
    wait; on a GPU it is one, or collectives shorter than that would all look hidden.
    """
    under_way = union((c.start, c.end) for c in trace.collectives)
    gap = 0.0 if trace.on_gpu else GAP_S
    return trace.phases | {"all-reduce": under_way, "wait": minus(under_way, union(trace.computes, gap))}


def merge(traces: Sequence[RankTrace]) -> Merged:
    """All on the clock of the lowest rank. BadInput if two are of one rank, or of jobs of different sizes."""
    require(bool(traces), "there is no trace to merge")
    traces = sorted(traces, key=lambda t: t.rank)
    for a, b in pairwise(traces):
        require(a.rank != b.rank, f"{a.path} and {b.path} are both of rank {a.rank}: give one file for each rank")
    sizes = {t.world_size: t.path for t in traces if t.world_size}
    require(
        len(sizes) < 2,
        "these are traces of different jobs: " + ", ".join(f"{p} has {n} ranks" for n, p in sizes.items()),
    )
    first = Offset(traces[0].rank, 0.0, 0.0, 0.0, 0.0, 0, "reference")
    return Merged(tuple(traces), (first, *(offset_of(traces[0], t) for t in traces[1:])))
