"""What does a launch do when a GPU or a rank fails?

    python -m labs.gpu.faulty --nproc 1 --fault oom

About 5 s on 2 CPU cores. A rank runs out of memory, triggers a device-side assert, is killed, or never answers. On a
CPU, the first two are raised with torch's wording for a GPU.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record

Fault = Literal["none", "oom", "assert", "sigkill", "timeout"]


@dataclass(frozen=True)
class Config:
    """Which fault to cause."""

    fault: Fault = "none"
    """The last rank's fault, or none."""
    smoke: bool = False
    """No effect: the run is already short."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Compute on the device, then cause the fault on the last rank while the others wait for it."""
    x = torch.ones(256, 256, device=rank.device)
    if rank.rank == rank.world_size - 1:
        FAULTS[config.fault](x)
    measure.sync(rank.device)
    rank.barrier()
    yield rank.record("sum", "1", (x @ x).sum().item())


def _out_of_memory(x: torch.Tensor) -> None:
    if x.device.type == "cpu":
        raise torch.OutOfMemoryError("CUDA out of memory (said on a CPU: nothing was asked for)")
    kept = []
    while True:  # until the card is full
        kept.append(torch.empty(2**32, dtype=torch.uint8, device=x.device))


def _assert(x: torch.Tensor) -> None:
    if x.device.type == "cpu":
        raise RuntimeError("CUDA error: device-side assert triggered (said on a CPU: no device was there)")
    table, rows = x, torch.tensor([10**6], device=x.device)
    table[rows]  # out of range: found by the kernel, reported at the next synchronisation
    measure.sync(x.device)


def _kill(x: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(x: torch.Tensor) -> None:
    time.sleep(3600)


FAULTS = {"none": lambda x: None, "oom": _out_of_memory, "assert": _assert, "sigkill": _kill, "timeout": _hang}

if __name__ == "__main__":
    cli.main()
