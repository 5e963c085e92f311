"""The job whose dumps exercise 10.3 begins with: three steps on four ranks, in which one of them goes astray."""

from __future__ import annotations

import torch
import torch.distributed as dist


def three_steps(rank: int, fault: str, pair: dist.ProcessGroup) -> None:
    """What each rank runs, with the group of its pair. A fault leaves the other ranks waiting in the third step."""
    for step in range(3):
        ill = step == 2
        dist.broadcast(torch.tensor([step]), 0)
        if fault == "skips its pair" and ill and rank == 1:
            return
        dist.all_reduce(torch.ones(8), group=pair)
        if fault == "leaves the loop" and ill and rank == 2:
            return
        if fault == "dies" and ill and rank == 3:
            return
        if fault == "gathers" and ill and rank == 0:
            dist.all_gather([torch.ones(16) for _ in range(4)], torch.ones(16))
        dist.all_reduce(torch.ones(16))
