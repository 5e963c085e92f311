"""What does starting and stopping ranks cost? A lab that does nothing else; labs.kit.bench times it.

python -m labs.kit.bench_empty
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from labs.kit import cli
from labs.kit.dist import Rank
from labs.kit.record import Record


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""

    smoke: bool = False
    """It is short already."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """One record, after all ranks have met."""
    rank.barrier()
    yield rank.record("ranks", "1", rank.world_size)


if __name__ == "__main__":
    cli.main()
