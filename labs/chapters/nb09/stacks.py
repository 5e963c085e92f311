"""A look at all ranks while one of them holds the others up, with py-spy where that is allowed. For notebook 09."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from labs import last_to_arrive as lab
from labs.chapters.nb09 import py_spy
from labs.common.profiling import late_training
from labs.common.profiling.late_training import Training

STEPS = 3
SHOWN = 3  # frames of the course's own files, the innermost first, after the innermost of all


class Looking(Training):
    """In the middle of its last backward, the late rank looks at all ranks, itself too: the others wait for it."""

    pids: tuple[int, ...] = ()
    seen: tuple[tuple[str, str], ...] = ()

    def delay(self, name: str) -> None:
        if name == "backward" and self.late.get(name):
            self.seen = tuple(py_spy.stack(pid) for pid in self.pids)


def look() -> list[tuple[list[str], str]] | None:
    """On ranks. The last one returns for each rank (frames of its main thread, why there are none), the others None."""
    me, pids = dist.get_rank(), [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    training = Looking(late_training.build(lab.Config()), 32, torch.device("cpu"))
    training.pids = tuple(pids)
    last = me == len(pids) - 1
    for step in range(STEPS):
        training.step({"backward": 1.0} if last and step == STEPS - 1 else {})
    return [(py_spy.frames(dump), why) for dump, why in training.seen] if last else None


def tell(found: list[Any]) -> None:
    """Print what each rank was doing, or in a line why that cannot be seen here."""
    seen = found[-1]
    reasons = [why for _, why in seen if why]
    if reasons:
        print(reasons[0])
        return
    for rank, (frames, _) in enumerate(seen):
        own = [frame for frame in frames[1:] if "(labs/" in frame][:SHOWN]
        print(f"rank {rank}: " + " < ".join([*frames[:1], *own]))
