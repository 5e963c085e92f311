"""Seconds of a collective or message, taken as in training: after some work of each rank's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.common.timing.collectives import LatencyBandwidth, fit
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank

MESSAGES = (2**12, 2**16, 2**20, 2**23)  # bytes, from latency-bound to bandwidth-bound


def require_messages(rank: Rank) -> None:
    """BadInput where ranks share a GPU: gloo, which they then talk through, sends no message from one."""
    require(
        rank.device.type == "cpu" or "nccl" in rank.backend,
        "ranks that share a GPU cannot send each other "
        'messages, since gloo sends those of the host only: use device="cpu"',
    )


def timed(operation: Callable[[], object], n: int, rank: Rank) -> list[float]:
    """Seconds of `n` calls of `operation` on the slowest rank, each after a millisecond of work; two more go first."""
    work = torch.ones(256, 256, device=rank.device)
    seconds = []
    for _ in range(n + 2):
        work = (work @ work).clamp(max=1.0)
        seconds += measure.time_steps(operation, 1, rank.device)
    return rank.slowest(seconds[2:])


def all_reduce_link(n: int, rank: Rank) -> tuple[dict[int, list[float]], LatencyBandwidth]:
    """({bytes: seconds of `n` all-reduces}, latency and bandwidth fitted to their medians): the same on all ranks."""
    seconds = {}
    for size in MESSAGES:
        buffer = torch.zeros(size // 4, device=rank.device)
        seconds[size] = timed(lambda b=buffer: dist.all_reduce(b), n, rank)
    return seconds, fit(list(seconds), [statistics.median(s) for s in seconds.values()])
