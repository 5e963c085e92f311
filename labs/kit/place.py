"""Read from the environment which rank a process is, and which ranks share its machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labs.kit.errors import BadInput


@dataclass(frozen=True)
class Launcher:
    """Names of a launcher's environment variables; "" for what it doesn't provide."""

    rank: str
    ranks: str
    local_rank: str
    local_ranks: str
    machine: str
    start: tuple[str, ...] = ()
    """Variables that together identify one start."""


LAUNCHERS = (
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
        ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_GTIDS",
        "SLURM_NODEID",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""torchrun and compatible launchers, Open MPI's mpirun, srun; innermost first, since mpirun starts its daemons with
srun. SLURM_STEP_NUM_TASKS belongs to the step. SLURM_NTASKS is also set in a batch script or interactive shell, which
is one process. SLURM_GTIDS lists the ranks of this machine: "0,1,2,3" (man srun)."""


@dataclass(frozen=True)
class Place:
    """A rank's position as its launcher reports it; by default a single process."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    machine: int = 0
    """The machine's number, or another number unique to it if the launcher provides none."""
    restart: int = 0
    start: str = ""
    """An id shared by exactly the ranks of this start; "" if their parent process identifies it."""
    listed: tuple[int, ...] = ()
    """Ranks of this machine if the launcher lists them; otherwise they are consecutive."""

    @classmethod
    def of(cls, env: Mapping[str, str], *, one_machine: bool) -> Place:
        """Read the environment. Raises BadInput if a number is invalid, or the numbers don't fit together.

        If the launcher doesn't say which ranks share a machine, all do if `one_machine`, otherwise none.
        """

        def number(name: str, default: int = 0) -> int:
            try:
                return int(env.get(name, default))
            except ValueError:
                raise BadInput(f"{name}={env[name]} in the environment is no number: start it by torchrun") from None

        number("RANK"), number("WORLD_SIZE")  # check both, even if only one is set
        told = [by for by in LAUNCHERS if by.rank in env and by.ranks in env]
        if not told:
            return cls()
        rank, ranks = number(told[0].rank), number(told[0].ranks)
        same = [by for by in told if (number(by.rank), number(by.ranks)) == (rank, ranks)]  # RANK=$SLURM_PROCID
        by = next((by for by in same if by.local_ranks in env), told[0])
        restart = number("TORCHELASTIC_RESTART_COUNT")
        local_rank, local_ranks, listed = (number(by.local_rank, rank), ranks, ()) if one_machine else (0, 1, ())
        if by.local_ranks in env:
            local_rank = number(by.local_rank, rank)
            listed = _listed(env[by.local_ranks]) if by.local_ranks == "SLURM_GTIDS" else ()
            local_ranks = len(listed) or number(by.local_ranks)
        start = ".".join(env[name] for name in by.start if name in env)
        place = cls(rank, ranks, local_rank, local_ranks, number(by.machine, rank - local_rank), restart, start, listed)
        if not (0 <= place.local_rank < place.local_ranks and 0 <= rank < ranks):
            raise BadInput(f"{place} in the environment: start it by torchrun")
        return place

    @property
    def neighbours(self) -> Sequence[int]:
        """Ranks of this machine."""
        first = self.rank - self.local_rank
        return self.listed or range(first, first + self.local_ranks)


def _listed(ranks: str) -> tuple[int, ...]:
    """Parse "1,3,5", which srun --distribution=cyclic produces. Raises BadInput for anything else."""
    try:
        return tuple(map(int, ranks.split(",")))
    except ValueError:
        raise BadInput(f"SLURM_GTIDS={ranks} in the environment is no list of ranks: start it by torchrun") from None
