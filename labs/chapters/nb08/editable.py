"""The editable round of notebook 08: an all-reduce that the learner changes, and what it sends on each level."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from labs.kit.rank import Rank
from labs.two_levels.two_levels import Nodes, sent_between, sent_by_level

NODES, PER_NODE = 2, 2
NUMBERS = 2**18  # 1 MiB

SumUp = Callable[[Tensor, dist.ProcessGroup, dist.ProcessGroup], None]


def count(sum_up: SumUp) -> dict:
    """On each of 4 ranks, 2 nodes of 2: whether x holds the sum, and bytes by level as parts of the vector."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("across", "inside"))
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    x = torch.full((NUMBERS,), float(rank + 1))
    sum_up(x, inside, across)
    who = Rank(rank, ranks, rank, ranks, torch.device("cpu"), "gloo", ())
    zeros = torch.zeros(NUMBERS)
    sent = sent_between(lambda: sum_up(zeros, inside, across), who)
    levels = sent_by_level(sent, Nodes(NODES, PER_NODE, 1e8, 1e7)) if sent else None
    right = bool((x == sum(range(1, ranks + 1))).all())
    return {"right": right, "sent": [max(b) / x.nbytes for b in levels] if levels else None}


def tell(found: list[dict]) -> None:
    """Print what a node sends, in vectors. The same on every machine whose kernel counts."""
    wrong = [r for r, f in enumerate(found) if not f["right"]]
    print(f"the sum is {'right on all ranks' if not wrong else f'WRONG on ranks {wrong}'}")
    if found[0]["sent"] is None:
        print("this kernel does not count what is sent")
        return
    inside, across = found[0]["sent"]
    print(f"inside each node {inside:.1f} vectors are sent, out of each node {across:.1f}")
