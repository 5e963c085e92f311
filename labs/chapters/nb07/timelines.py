"""Timelines of one DDP step on several ranks, made from a seed, and what would change if a setting were another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from labs.parts.data_parallel.scaling import ring_all_reduce_bytes

REMEDIES = ("nothing", "smaller buckets", "larger buckets", "faster wire", "mend the straggler")
HIDDEN = 0.1  # of communication exposed: below, there is nothing to mend
LAYERS = 24  # of equal size; a bucket holds whole layers
FASTER = 2.0  # times as fast: what "faster wire" stands for, or half of the bytes


class Bucket(NamedTuple):
    """A bucket on one rank; times in ms since the step began, of a clock that all ranks share."""

    mb: float
    ready: float
    """When its last gradient was there."""
    start: float
    """When this rank joined its all-reduce: not before it was ready, and not before the last one had ended."""
    end: float
    """When its all-reduce ended, on all ranks at once."""


class RankTimeline(NamedTuple):
    """What one rank did in a step; times in ms."""

    backward: tuple[float, float]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Job:
    """What a step is made from."""

    forward_ms: float
    backward_ms: tuple[float, ...]
    """Of each rank."""
    mb: float
    """Gradients, in 10^6 bytes."""
    buckets: int
    """Of LAYERS, equally many in each."""
    latency_ms: float
    mb_per_ms: float
    """Bandwidth of the wire in one direction, in 10^6 byte/ms = GB/s."""


def simulate(job: Job) -> list[RankTimeline]:
    """A step of it: an all-reduce begins to move when the last rank has joined, one bucket after the other."""
    ranks, free = len(job.backward_ms), 0.0
    found: list[list[Bucket]] = [[] for _ in range(ranks)]
    each = job.mb / job.buckets
    moves_ms = job.latency_ms + ring_all_reduce_bytes(each, ranks) / job.mb_per_ms
    for k in range(job.buckets):
        ready = [job.forward_ms + b * (k + 1) / job.buckets for b in job.backward_ms]
        starts = [max(r, free) for r in ready]
        free = max(starts) + moves_ms
        for rank in range(ranks):
            found[rank].append(Bucket(each, ready[rank], starts[rank], free))
    ends = [(job.forward_ms, job.forward_ms + b) for b in job.backward_ms]
    return [RankTimeline(e, tuple(b)) for e, b in zip(ends, found, strict=True)]


def step_ms(job: Job) -> float:
    """Until the last bucket is averaged."""
    return simulate(job)[0].buckets[-1].end


def exposed(rank: RankTimeline) -> tuple[float, float]:
    """ms of a rank's all-reduces after the end of its backward, and ms of all of them."""
    done = rank.backward[1]
    return sum(max(0.0, b.end - max(b.start, done)) for b in rank.buckets), sum(b.end - b.start for b in rank.buckets)


def shares(timeline: Sequence[RankTimeline]) -> list[float]:
    """Of each rank's communication, the share that is exposed."""
    return [late / total for late, total in map(exposed, timeline)]


def with_remedy(job: Job, remedy: str) -> float:
    """The shortest step in ms that a remedy gives; other bucket counts are all that divide LAYERS."""
    counts = [n for n in range(1, LAYERS + 1) if LAYERS % n == 0]
    if remedy in ("smaller buckets", "larger buckets"):
        tried = [n for n in counts if (n > job.buckets if remedy == "smaller buckets" else n < job.buckets)]
        return min((step_ms(replace(job, buckets=n)) for n in tried), default=step_ms(job))
    if remedy == "faster wire":
        return step_ms(replace(job, mb_per_ms=FASTER * job.mb_per_ms))
    if remedy == "mend the straggler":
        middle = sorted(job.backward_ms)[(len(job.backward_ms) - 1) // 2]
        return step_ms(replace(job, backward_ms=tuple(min(b, middle) for b in job.backward_ms)))
    return step_ms(job)


def answer(job: Job) -> str:
    """The remedy that helps; "" if it is not clear.

    The best must win back 1.5 times what the second does, and 40 % of the waiting: the time from the end of the
    fastest rank's backward to the end of the step.
    """
    if max(shares(simulate(job))) < HIDDEN:
        return "nothing"
    now = step_ms(job)
    won = {r: now - with_remedy(job, r) for r in REMEDIES[1:]}
    best, second = sorted(won, key=won.__getitem__)[:-3:-1]
    waits = now - job.forward_ms - min(job.backward_ms)
    return best if won[best] > 0.4 * waits and won[best] > 1.5 * won[second] else ""


@cache
def job(seed: int) -> Job:
    """A job whose remedy is clear. Five seeds one after the other have five remedies, in an order of their own."""
    draw = random.Random(seed // len(REMEDIES))
    order = draw.sample(REMEDIES, len(REMEDIES))
    wanted, draw = order[seed % len(REMEDIES)], random.Random(seed)
    while True:
        ranks = draw.choice((2, 3, 4))
        backward = draw.uniform(40, 120)
        slow = draw.uniform(1.4, 1.8) if wanted == "mend the straggler" else 1.0
        straggler = draw.randrange(ranks)
        every = tuple(backward * draw.uniform(1, 1.04) * (slow if r == straggler else 1) for r in range(ranks))
        found = Job(
            draw.uniform(20, 60),
            every,
            draw.uniform(50, 400),
            draw.choice((1, 2, 3, 4, 6, 8, 12, 24)),
            draw.choice((0.05, 0.1, 1.0, 3.0, 6.0)),
            draw.uniform(0.5, 25),
        )
        if answer(found) == wanted and _one_rank_is_worst(found):
            return found


def _one_rank_is_worst(found: Job) -> bool:
    every = sorted(shares(simulate(found)))
    return every[-1] < HIDDEN / 2 or (every[-1] > 2 * HIDDEN and every[-1] - every[-2] > 0.005)


def timeline(seed: int) -> list[RankTimeline]:
    """One RankTimeline for each rank, in ms, to a thousandth."""
    return [
        RankTimeline(
            tuple(round(t, 3) for t in rank.backward), tuple(Bucket(*(round(t, 3) for t in b)) for b in rank.buckets)
        )
        for rank in simulate(job(seed))
    ]


def show(found: Sequence[RankTimeline]) -> None:
    """Print a timeline, a line for each rank and bucket."""
    for rank, (backward, buckets) in enumerate(found):
        print(f"rank {rank}: backward {backward[0]:.1f} to {backward[1]:.1f} ms")
        for k, b in enumerate(buckets):
            print(f"  bucket {k}: {b.mb:.1f} MB, ready {b.ready:.1f}, all-reduce {b.start:.1f} to {b.end:.1f} ms")
