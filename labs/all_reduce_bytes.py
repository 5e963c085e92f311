"""How many bytes does each rank send in a collective?

    python -m labs.all_reduce_bytes --nproc 4 --oversubscribe
    torchrun --nproc-per-node 2 -m labs.all_reduce_bytes

About 1 s on 2 CPU cores. Reads the kernel's count of bytes sent on each TCP connection, so it needs CPU ranks under
Linux. Compares the counts with the ring's formula: 2 (n-1)/n of the buffer for an all-reduce, (n-1)/n for a
reduce-scatter or an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge

from labs.common.communication import wire
from labs.common.data_parallel.wire import sent_by
from labs.common.timing.collectives import bus_factor
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.lab import imported
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

NEAR = 0.02
"""Tolerance for protocol headers, as a share of the buffer."""


@dataclass(frozen=True)
class Config:
    """What to exchange."""

    megabytes: Annotated[int, Ge(1)] = 8
    """Size of the whole buffer in MiB, even where each rank holds only a part of it."""
    by_hand: str = ""
    """Your own all-reduce: in a notebook a function of one tensor, otherwise package.module:function. Empty: none."""
    smoke: bool = False
    """Has no effect: the run is short anyway."""

    def __post_init__(self) -> None:
        if self.by_hand:
            imported(self.by_hand, "by_hand")


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput for a single rank."""
    require(world_size >= 2, "an all-reduce needs at least two ranks: use nproc=2")


def collectives(config: Config, rank: Rank) -> dict[str, tuple[str, Callable[[], object]]]:
    """Return {name: (collective, call)}."""
    n = rank.world_size
    whole = torch.zeros(config.megabytes * 2**18 // n * n)
    part = whole.chunk(n)[rank.rank].clone()
    # torch 2.13 renamed both collectives
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: dict[str, tuple[str, Callable[[], object]]] = {
        "all_reduce": ("all_reduce", lambda: dist.all_reduce(whole)),
        "reduce_scatter": ("reduce_scatter", lambda: reduce_scatter(part, whole)),
        "all_gather": ("all_gather", lambda: all_gather(whole, part)),
    }
    if config.by_hand:
        function = imported(config.by_hand, "by_hand")
        found = {"by hand": ("all_reduce", lambda: function(whole))} | found
    return found


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield bytes sent over the buffer's size: the busiest rank's, counted by the kernel, and the formula's."""
    wire.require_tcp(rank)
    for name, (op, call) in collectives(config, rank).items():
        call()  # opens the connections
        sent, size = sent_by(call, rank), config.megabytes * 2**20
        if sent is not None:
            yield rank.record("sent", "1", max(sent) / size, collective=name)
        yield rank.record("ring", "1", bus_factor(op, rank.world_size), kind="modelled", collective=name)


def category(records: Records) -> str:
    """Say whether all_reduce sends "as a ring", "more" or "fewer" bytes; "not counted" if the kernel doesn't count."""
    counted = records.where("sent", collective="all_reduce")
    if not counted:
        return "not counted"
    more = counted[0].value - records.one("ring", collective="all_reduce").value
    return "as a ring" if abs(more) <= NEAR else "more" if more > 0 else "fewer"


def answer(records: Records) -> Iterator[str]:
    """Yield each collective's counted bytes beside the formula."""
    ranks = records[0].layout["world_size"]
    for formula in records.where("ring"):
        name = formula.case["collective"]
        counted = records.where("sent", collective=name)
        found = f"{counted[0].value:.2f}" if counted else "an unknown number of"
        yield f"{name}: each of {ranks} ranks sends {found} times the buffer; a ring sends {formula.value:.2f} times."


if __name__ == "__main__":
    cli.main()
