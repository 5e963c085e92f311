"""Which rank a process is, and with which others it shares a machine: what a launcher has said in the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labs.kit.errors import BadInput


@dataclass(frozen=True)
class Launcher:
    """Names of its variables; "" for what it does not say."""

    rank: str
    ranks: str
    local_rank: str
    local_ranks: str
    machine: str
    start: tuple[str, ...] = ()
    """Together they name one start."""


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
"""torchrun and those who follow it, Open MPI's mpirun, srun. The first that speaks is the innermost: mpirun starts its
daemons by srun. Of a job's SLURM_NTASKS a batch script and an interactive shell hear as well, which are one process;
SLURM_STEP_NUM_TASKS is of the step. SLURM_GTIDS lists the ranks of this machine: "0,1,2,3" (man srun)."""


@dataclass(frozen=True)
class Place:
    """Of a rank, as its launcher tells it; alone where nobody has."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1
    machine: int = 0
    """Its number, or where the launcher gives it none, another that no other machine has."""
    restart: int = 0
    start: str = ""
    """The same for all ranks of this start, and for no others; "" where their parent process is that."""
    listed: tuple[int, ...] = ()
    """Ranks of this machine where the launcher lists them; else they count on in a row."""

    @classmethod
    def of(cls, env: Mapping[str, str], *, one_machine: bool) -> Place:
        """BadInput if a number is none, or they do not fit.

        Not every launcher says which ranks share a machine. Then all of them do if `one_machine`, otherwise none.
        """

        def number(name: str, default: int = 0) -> int:
            try:
                return int(env.get(name, default))
            except ValueError:
                raise BadInput(f"{name}={env[name]} in the environment is no number: start it by torchrun") from None

        number("RANK"), number("WORLD_SIZE")  # one of them alone is to be a number, too
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
    """Of "1,3,5", as srun --distribution=cyclic deals ranks out. BadInput if it is no such list."""
    try:
        return tuple(map(int, ranks.split(",")))
    except ValueError:
        raise BadInput(f"SLURM_GTIDS={ranks} in the environment is no list of ranks: start it by torchrun") from None
