"""Ring all-reduce by hand: reduce-scatter, then all-gather, from messages between neighbours.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", Journal of Parallel and Distributed Computing 69
(2009). Each rank sends 2 (n-1)/n times the vector, whatever n is, and never waits for more than one neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(x: Tensor) -> None:
    """Sum of `x` over all ranks, in place on every rank. `x` is one-dimensional, contiguous and equally long."""
    parts = x.tensor_split(dist.get_world_size())  # views: what is written into a part is written into x
    reduce_scatter(parts)  # now rank r holds the sum of part r + 1, and of no other
    all_gather(parts)  # now every rank holds every sum


def reduce_scatter(parts: Sequence[Tensor]) -> None:
    """n - 1 steps: a part goes round the ring and each rank adds its own. Rank r ends with the sum of part r + 1."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        sends, receives = (rank - step) % ranks, (rank - step - 1) % ranks
        parts[receives].add_(exchange(parts[sends], torch.empty_like(parts[receives])))


def all_gather(parts: Sequence[Tensor]) -> None:
    """n - 1 steps: finished sums go round the ring and are copied. Rank r begins with part r + 1."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(ranks - 1):
        sends, receives = (rank + 1 - step) % ranks, (rank - step) % ranks
        exchange(parts[sends], parts[receives])


def exchange(out: Tensor, into: Tensor) -> Tensor:
    """Send `out` to the right neighbour while `into` arrives from the left one; returns `into`.

    Both at once. With `dist.send` first on every rank, each would wait for a neighbour that has not begun to receive:
    a deadlock, as soon as a message is larger than the buffers on the way.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    both = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    return into


@dataclass(frozen=True)
class Snapshot:
    """Which ranks' contributions are in each part of each rank, after a number of steps."""

    step: int
    phase: str
    """ "start", "reduce-scatter" or "all-gather"."""
    sent: tuple[int, ...]
    """The part that each rank sent in this step; empty at the start."""
    holds: tuple[tuple[frozenset[int], ...], ...]
    """[rank][part]: the ranks whose numbers are in it."""


def snapshots(ranks: int) -> Iterator[Snapshot]:
    """The same algorithm on sets in place of numbers, step by step: what a picture of it shows."""
    holds = [[frozenset({r}) for _ in range(ranks)] for r in range(ranks)]
    yield Snapshot(0, "start", (), tuple(map(tuple, holds)))
    for step in range(2 * (ranks - 1)):
        gathering, k = step >= ranks - 1, step % (ranks - 1)
        sent = tuple((r + gathering - k) % ranks for r in range(ranks))
        arriving = [holds[r - 1][sent[r - 1]] for r in range(ranks)]  # all at once, before anybody writes
        for r in range(ranks):
            part = sent[r - 1]
            holds[r][part] = arriving[r] if gathering else holds[r][part] | arriving[r]
        phase = "all-gather" if gathering else "reduce-scatter"
        yield Snapshot(step + 1, phase, sent, tuple(map(tuple, holds)))
