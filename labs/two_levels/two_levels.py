"""Nodes with a fast inside and a slow wire between them: bytes and seconds by level, and ways to sum over both.

A rank talks at one speed to the ranks of its node and at another to those of other nodes, and all ranks of a node share
one way out: a network card. Ranks are numbered node by node, as torchrun does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from labs.common.communication import wire
from labs.common.data_parallel.wire import sent_through
from labs.common.sharding.traffic import sent_bytes
from labs.kit.errors import require
from labs.kit.rank import Rank

# torch 2.13 has given these two new names
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Nodes:
    """`count` machines of `per_node` ranks, and byte/s of each connection inside and of each machine's network card."""

    count: int
    per_node: int
    inside_b_s: float
    across_b_s: float

    def __post_init__(self) -> None:
        require(self.count >= 1 and self.per_node >= 1, "there must be a node, and a rank in it")
        for b_s in (self.inside_b_s, self.across_b_s):
            wire.require_rate(b_s)

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.count * self.per_node

    def node(self, rank: int) -> int:
        """The node that `rank` is on."""
        return rank // self.per_node

    def same(self, one: int, other: int) -> bool:
        """Whether two ranks are on one node."""
        return self.node(one) == self.node(other)

    def node_by_node(self) -> list[int]:
        """A ring that leaves each node once."""
        return list(range(self.ranks))

    def in_turn(self) -> list[int]:
        """A ring in which every neighbour is on another node: the first rank of each, then the second of each ..."""
        return [node * self.per_node + k for k in range(self.per_node) for node in range(self.count)]


# -- ways to sum


def ring_in_order(x: Tensor, order: Sequence[int]) -> None:
    """Sum of `x` over all ranks, in place, by a ring in which rank order[i] sends to rank order[i + 1].

    Reduce-scatter, then all-gather, of n - 1 steps each (Patarasuk & Yuan 2009).
    """
    place, ranks = order.index(dist.get_rank()), len(order)
    right, left = order[(place + 1) % ranks], order[place - 1]
    parts = x.tensor_split(ranks)  # views
    for step in range(2 * (ranks - 1)):
        sends, receives = (place - step) % ranks, (place - step - 1) % ranks
        if gathering := step >= ranks - 1:  # whole sums now, one part further on
            sends, receives = (sends + ranks) % ranks, (receives + ranks) % ranks
        arrives = torch.empty_like(parts[receives])
        both = [dist.P2POp(dist.isend, parts[sends], right), dist.P2POp(dist.irecv, arrives, left)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        parts[receives].copy_(arrives) if gathering else parts[receives].add_(arrives)


def hierarchical_all_reduce(x: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup) -> None:
    """Sum of `x` over all ranks, in place: only 1/k of it leaves through each of a node's k ranks.

    `inside` is this rank's node, `across` holds the ranks that have this rank's place on their nodes. The length of `x`
    must be a multiple of the ranks of a node.
    """
    part = torch.empty(len(x) // inside.size(), dtype=x.dtype, device=x.device)
    reduce_scatter(part, x, group=inside)  # the node's sum, each rank has a part of it
    dist.all_reduce(part, group=across)  # the sum over all nodes, part by part: all that is slow
    all_gather(x, part, group=inside)  # the parts together again


# -- bytes and seconds by level


@dataclass(frozen=True)
class Phase:
    """What happens at once: bytes that leave each node, and bytes of the busiest connection inside."""

    across: float
    link: float
    links: int
    """Connections of a node that carry so much to a rank of the same node."""

    @property
    def inside(self) -> float:
        """Bytes that the ranks of a node send each other."""
        return self.link * self.links

    def seconds(self, nodes: Nodes) -> float:
        """Of the level that takes longer: a ring's steps go on at the speed of its slowest link."""
        return max(self.link / nodes.inside_b_s, self.across / nodes.across_b_s)


def over_all(kind: str, size: float, nodes: Nodes, gloo: bool = False) -> Phase:
    """A collective of all ranks, in a ring that leaves each node once: each link carries what each rank sends."""
    sent = sent_bytes(kind, size, nodes.ranks, gloo)
    return Phase(sent if nodes.count > 1 else 0.0, sent, nodes.per_node - 1)


def in_turn(size: float, nodes: Nodes) -> Phase:
    """An all-reduce by a ring in which every neighbour is on another node: every link leaves one."""
    require(nodes.count > 1, "with one node there is no other to go to")
    return Phase(nodes.per_node * sent_bytes("all_reduce", size, nodes.ranks), 0.0, 0)


def within(kind: str, size: float, nodes: Nodes, gloo: bool = False) -> Phase:
    """A collective of each node by itself."""
    return Phase(0.0, sent_bytes(kind, size, nodes.per_node, gloo), nodes.per_node)


def between(size: float, nodes: Nodes) -> Phase:
    """All-reduces of the ranks that have the same place on each node, of `size` bytes together, at once."""
    return Phase(sent_bytes("all_reduce", size, nodes.count), 0.0, 0)


def hierarchical(size: float, nodes: Nodes, gloo: bool = False) -> list[Phase]:
    """The three phases of `hierarchical_all_reduce`. The formula: S 2(k-1)/k / inside + S 2(m-1)/m / across.

    For k ranks on each of m nodes. With `gloo`, a reduce-scatter sends twice as much (labs.common.sharding.traffic).
    """
    return [within("reduce_scatter", size, nodes, gloo), between(size, nodes), within("all_gather", size, nodes)]


def total(phases: Sequence[Phase], nodes: Nodes) -> tuple[float, float, float]:
    """(bytes inside each node, bytes out of each node, seconds) of phases that follow each other."""
    return (sum(p.inside for p in phases), sum(p.across for p in phases), sum(p.seconds(nodes) for p in phases))


def crossings(order: Sequence[int], nodes: Nodes) -> int:
    """How many links of a ring leave a node for another."""
    return sum(not nodes.same(a, b) for a, b in pairwise([*order, order[0]]))


# -- the same on real ranks


@contextmanager
def two_speeds(rank: Rank, nodes: Nodes, lanes: int = 1) -> Iterator[None]:
    """Every connection inside a node at one speed, every one between nodes at a share of the other. Collective.

    The kernel paces connections, not network cards. `lanes` is how many of a node's connections send to other nodes at
    once: each gets that share of the card, which is what a card does when they compete for it.
    """
    with ExitStack() as stack:
        if nodes.per_node > 1:
            stack.enter_context(wire.paced(rank, nodes.inside_b_s, nodes.same))
        if nodes.count > 1:
            apart = nodes.across_b_s / lanes
            stack.enter_context(wire.paced(rank, apart, lambda one, other: not nodes.same(one, other)))
        yield


def sent_between(call: Callable[[], object], rank: Rank) -> list[dict[int, int]] | None:
    """[rank][peer]: bytes that one `call` sends, as the kernel counts them; None where it does not tell. Collective.

    `call` must have run before: connections that it opens would not be seen.
    """
    rank.barrier()
    links = wire.links(rank)
    before = {peer: sent_through(fds) for peer, fds in links.items()}
    call()
    sent = {peer: sent_through(fds) - before[peer] for peer, fds in links.items()}
    every = rank.gather(sent)  # after the count: this exchange sends bytes, too
    return every if any(map(sum, (peers.values() for peers in every))) else None


def sent_by_level(sent: Sequence[Mapping[int, int]], nodes: Nodes) -> tuple[list[int], list[int]]:
    """([bytes sent inside each node], [bytes that leave each node]), of what `sent_between` counts."""
    inside, across = [0] * nodes.count, [0] * nodes.count
    for one, peers in enumerate(sent):
        for other, b in peers.items():
            (inside if nodes.same(one, other) else across)[nodes.node(one)] += b
    return inside, across
