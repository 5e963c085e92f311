"""One rank of a job of any size, in one process: torch's own fake process group, whose messages go nowhere.

    with fake_job(256) as fake:
        mesh = init_device_mesh("cpu", (256,))
        with fake, Traffic() as traffic:             # fake tensors: shapes without numbers, so a large model fits
            ...                                      # the same lines as on real ranks
        print(by_call(traffic, per_node=8))

Every collective returns at once. So calls, sizes and groups are a real rank's; results, waiting and time are not.
torch keeps this part among its own test utilities and may change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pandas as pd
import torch.distributed as dist

from labs.common.sharding.traffic import Traffic
from labs.kit import _compat
from labs.kit.errors import require


@contextmanager
def fake_job(ranks: int, rank: int = 0) -> Iterator[_compat.FakeTensorMode]:
    """This process is rank `rank` of `ranks` within the block. BadInput if it's a rank of a job already."""
    require(0 <= rank < ranks, f"there is no rank {rank} among {ranks}")
    require(not dist.is_initialized(), "this process is a rank of a job already: leave it first, or use another one")
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield _compat.FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


def crossing_share(members: Sequence[int], per_node: int) -> float:
    """The share of the links of a ring over these ranks, in this order, that go from one node to another."""
    if len(members) < 2:
        return 0.0
    links = list(pairwise([*members, members[0]]))
    return sum(a // per_node != b // per_node for a, b in links) / len(links)


def by_call(traffic: Traffic, per_node: int) -> pd.DataFrame:
    """GB that a node of `per_node` ranks sends inside and out, by kind of call and size of its group.

    Bytes are a ring's in the order of the ranks, whose numbers go node by node. Call it while the job exists.
    """
    rows = []
    for call in traffic.calls:
        crosses = crossing_share(dist.get_process_group_ranks(_compat.resolve_group(call.group)), per_node)
        sent_gb = per_node * call.sent_bytes / 1e9
        rows.append(
            {"call": call.kind, "ranks": call.ranks, "inside": (1 - crosses) * sent_gb, "out": crosses * sent_gb}
        )
    table = pd.DataFrame(rows).groupby(["call", "ranks"], sort=False)
    return table.agg(calls=("out", "size"), inside_gb=("inside", "sum"), out_gb=("out", "sum")).reset_index()
