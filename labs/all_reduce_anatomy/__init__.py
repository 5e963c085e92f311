"""What happens inside an all-reduce, and what does each collective send?

    python -m labs.all_reduce_anatomy                           # launches its own ranks
    torchrun --nproc-per-node 4 -m labs.all_reduce_anatomy

About 6 s on 2 CPU cores. Two parts:
  by hand      a ring all-reduce from messages between neighbours, against torch's own: the sums and the bytes sent
  collectives  each collective's bytes on the wire, from the counters of the TCP connections, and its bandwidth, as
               nccl-tests defines it: algbw = size / time, busbw = algbw x a factor that makes it comparable to a link
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from labs.all_reduce_anatomy.ring import ring_all_reduce
from labs.common.communication.wire import in_turn
from labs.common.data_parallel.wire import sent_by
from labs.common.sharding.link import require_messages
from labs.common.timing.collectives import bus_factor, busbw_b_s
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

COLLECTIVE_BYTES = 2**23
HAND_NUMBERS = 2**20


@dataclass(frozen=True)
class Config:
    """For how long messages are sent."""

    seconds: float = 6.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that each collective is timed; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """Two rounds."""

    def __post_init__(self) -> None:
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank, which has nobody to talk to."""
    require(world_size >= 2, "one rank has nobody to talk to: use nproc=2")


def collectives(size: int, rank: Rank) -> dict[str, Callable[[], object]]:
    """A call of each collective for buffers of `size` bytes: of the whole, gathered one where ranks hold parts."""
    n = rank.world_size
    whole = torch.zeros(size // 4 // n * n, device=rank.device)
    part = whole.chunk(n)[rank.rank].clone()
    other = torch.empty_like(whole)
    # torch 2.13 has given these two new names
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter(part, whole),
        "all_gather": lambda: all_gather(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
    }


def predict(op: str, size: float, ranks: int) -> float:
    """Bytes that the busiest rank must send at least, for a buffer of `size` bytes.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md: the factor of a collective's bus bandwidth is what its busiest link
    carries per byte.
    """
    return bus_factor(op, ranks) * size


def rounding_bound(ranks: int) -> float:
    """The most by which two orders of adding `ranks` FP32 numbers in [0, 1) may differ.

    Each of the ranks - 1 additions of each order is off by at most half a spacing of FP32, 2^-24, of a sum below
    `ranks`. Source: Higham, Accuracy and Stability of Numerical Algorithms, section 4.2.
    """
    return 2 * (ranks - 1) * 2**-24 * ranks


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """By hand, then every collective."""
    require_messages(rank)
    yield from by_hand(rank)
    size = COLLECTIVE_BYTES  # in a smoke run, too: gloo picks some algorithms by size
    calls = collectives(size, rank)
    for op, call in calls.items():
        call()  # makes the connections that it needs
        if (sent := sent_by(call, rank)) is not None:
            yield rank.record("sent_bytes", "B", sent, op=op, size=size)
        yield rank.record("sent_bytes", "B", predict(op, size, rank.world_size), kind="modelled", op=op, size=size)
    for op, samples in in_turn(calls, config, rank).items():
        yield rank.record("seconds", "s", samples, op=op, size=size)
        yield rank.record(
            "busbw_b_s", "B/s", [busbw_b_s(size, s, rank.world_size, op) for s in samples], op=op, size=size
        )


def by_hand(rank: Rank) -> Iterator[Record]:
    """The ring of labs.all_reduce_anatomy.ring against torch's all-reduce: how far apart, and what each rank sent.

    Integers in FP32 are summed without rounding: every order of additions gives the same bits. Random numbers are not:
    with three ranks or more, another order is another rounding.
    """
    generator = torch.Generator().manual_seed(rank.rank)
    whole_numbers = torch.randint(-1000, 1000, (HAND_NUMBERS,), generator=generator).float()
    for numbers, x in (("integers", whole_numbers), ("random", torch.rand(HAND_NUMBERS, generator=generator))):
        x = x.to(rank.device)
        by_hand, by_torch = x.clone(), x.clone()
        sent = sent_by(partial(ring_all_reduce, by_hand), rank)
        dist.all_reduce(by_torch)
        error = (by_hand - by_torch).abs().max().item()
        yield rank.record("max_error", "1", max(rank.gather(error)), numbers=numbers)
    if sent is not None:
        yield rank.record("sent_bytes", "B", sent, op="ring by hand", size=4 * HAND_NUMBERS)
    modelled = predict("all_reduce", 4 * HAND_NUMBERS, rank.world_size)
    yield rank.record("sent_bytes", "B", modelled, kind="modelled", op="ring by hand", size=4 * HAND_NUMBERS)


def answer(run: Records) -> Iterator[str]:
    """Whether the ring by hand is right, which collective sends more than it must, and how fast an all-reduce is."""
    ranks = run[0].layout["world_size"]
    random = run.one("max_error", numbers="random").value
    right = run.one("max_error", numbers="integers").value == 0 and random <= rounding_bound(ranks)
    yield f"The ring by hand {'gives' if right else 'does not give'} what all_reduce gives, on {ranks} ranks."
    size = run.one("busbw_b_s", op="all_reduce").case["size"]
    more = {op: sent for op, sent in over_needed(run).items() if sent > WASTE}
    if more:
        told = ", ".join(f"{op} {times:.1f} times" for op, times in more.items())
        yield f"More than a ring needs is sent by {told}: this backend does it in another way."
    elif any(r.kind != "modelled" for r in run.where("sent_bytes")):
        yield "No collective sends more than its closed form."
    bus = measure.estimate(run.one("busbw_b_s", op="all_reduce").samples, "B/s")
    yield f"An all-reduce of {size / 1e6:.1f} MB reaches {bus} of bus bandwidth."


WASTE = 1.2
"""So many times the bytes of the closed form are more than headers."""


def over_needed(run: Records) -> dict[str, float]:
    """{collective: bytes of the busiest rank over what its closed form says}, where the kernel counts."""
    needed = {r.case["op"]: r.value for r in run.where("sent_bytes") if r.kind == "modelled"}
    counted = {r.case["op"]: max(r.samples) for r in run.where("sent_bytes") if r.kind != "modelled"}
    return {op: sent / needed[op] for op, sent in counted.items()}
