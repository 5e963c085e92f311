"""What does a launch do when a rank goes wrong?

python -m labs_for_tests.faulty --fault raise --on-rank 1
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch.utils.data import DataLoader

from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank
from labs.kit.record import Record

Fault = Literal["none", "raise", "bad_input", "sigkill", "sigstop", "sleep", "absent", "exit", "segfault"]


@dataclass(frozen=True)
class Config:
    """Which rank goes wrong, and how."""

    fault: Fault = "none"
    """What one rank does while its peers wait in a collective."""
    on_rank: int = 1
    """The rank that does it."""
    workers: int = 0
    """DataLoader workers of every rank, alive all the while."""
    say: str = ""
    """What every rank prints."""
    smoke: bool = False
    """It is short already."""

    def __post_init__(self) -> None:
        require(self.workers >= 0, f"workers must be at least 0, not {self.workers}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """A barrier, the fault, a barrier."""
    if config.say:
        print(config.say)
        print(config.say, "(stderr)", file=sys.stderr)
    batches = iter(DataLoader(range(10**6), num_workers=config.workers))
    next(batches)
    rank.barrier()
    rank.progress(1, 2, "at the fault")
    if rank.rank == config.on_rank and config.fault != "none":
        go_wrong(config.fault)
    if config.fault != "absent" or rank.rank != config.on_rank:
        rank.barrier()
    yield rank.record("ranks", "1", rank.world_size)


def go_wrong(fault: Fault) -> None:
    """Do it."""
    match fault:
        case "raise":
            raise ValueError("this batch is broken")
        case "bad_input":
            raise BadInput("batch_size 3 cannot be split over 2 ranks: take a multiple of 2")
        case "sigkill" | "sigstop" | "segfault":
            names = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "segfault": signal.SIGSEGV}
            os.kill(os.getpid(), names[fault])
        case "sleep":
            time.sleep(3600)
        case "exit":
            os._exit(3)


if __name__ == "__main__":
    cli.main()
