"""Which rank a process is, and with which others it shares a machine: what a launcher has said in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labs.kit.errors import BadInput


@dataclass(frozen=True)
class Place:
    """Of a rank, as torchrun and others who follow it tell it; alone where nobody has."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    machine: int = 0
    restart: int = 0

    @classmethod
    def of(cls, env: Mapping[str, str], *, one_machine: bool) -> Place:
        """BadInput if a number is none, or they do not fit.

        Not every launcher says which ranks share a machine. Then all of them do if `one_machine`, otherwise none.
        """

        def number(name: str, default: int) -> int:
            try:
                return int(env.get(name, default))
            except ValueError:
                raise BadInput(f"{name}={env[name]} in the environment is no number: start it by torchrun") from None

        rank, ranks = number("RANK", 0), number("WORLD_SIZE", 1)
        machine, restart = number("GROUP_RANK", 0), number("TORCHELASTIC_RESTART_COUNT", 0)
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return cls()
        if "LOCAL_WORLD_SIZE" not in env and not one_machine:
            return cls(rank, ranks, restart=restart)
        place = cls(rank, ranks, number("LOCAL_RANK", rank), number("LOCAL_WORLD_SIZE", ranks), machine, restart)
        if not (0 <= place.local_rank < place.local_ranks and 0 <= rank < ranks):
            raise BadInput(f"{place} in the environment: start it by torchrun")
        return place

    @property
    def neighbours(self) -> range:
        """Ranks of this machine."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_ranks)
