"""How long does it take to start and stop ranks that do nothing?

python -m labs_for_tests.empty
"""

from collections.abc import Iterator
from dataclasses import dataclass

from labs.kit import cli
from labs.kit.rank import Rank
from labs.kit.record import Record


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""

    smoke: bool = False
    """It is short already."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """One record of the whole job and one of each rank."""
    yield rank.record("ranks", "1", rank.world_size)
    yield rank.record("own_rank", "1", rank.rank, rank=rank.rank, on=rank.rank)


if __name__ == "__main__":
    cli.main()
