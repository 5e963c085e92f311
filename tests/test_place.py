"""A rank knows its place from its launcher's environment."""

import pytest

from labs.kit.place import Place

BY_SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "4,5,6,7",
}
BY_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "9",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-7",
}


@pytest.mark.parametrize(
    ("environ", "place", "neighbours"),
    [
        ({}, Place(), [0]),
        (
            {
                "RANK": "5",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "4",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            Place(5, 8, 1, 4, 4, restart=2),
            [4, 5, 6, 7],
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"},
            Place(5, 8, 1, 4, 1),
            [4, 5, 6, 7],
        ),
        ({"RANK": "1", "WORLD_SIZE": "3"}, Place(1, 3, 1, 3), [0, 1, 2]),
        (BY_SRUN, Place(5, 8, 1, 4, 1, start="4711.3", listed=(4, 5, 6, 7)), [4, 5, 6, 7]),
        (
            {**BY_SRUN, "RANK": "5", "WORLD_SIZE": "8"},
            Place(5, 8, 1, 4, 1, start="4711.3", listed=(4, 5, 6, 7)),
            [4, 5, 6, 7],
        ),  # by a script
        (
            {**BY_SRUN, "SLURM_LOCALID": "2", "SLURM_GTIDS": "1,3,5,7"},
            Place(5, 8, 2, 4, 1, start="4711.3", listed=(1, 3, 5, 7)),
            [1, 3, 5, 7],
        ),  # --distribution=cyclic
        (
            {**BY_SRUN, "RANK": "1", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"},
            Place(1, 16, 1, 2),
            [0, 1],
        ),  # torchrun, started by srun
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0"},
            Place(),
            [0],
        ),  # by sbatch
        ({**BY_SRUN, **BY_MPIRUN}, Place(6, 9, 0, 3, 6, start="prterun-7"), [6, 7, 8]),
    ],
)
def test_a_rank_knows_its_place(environ, place, neighbours):
    assert Place.of(environ, one_machine=True) == place and [*place.neighbours] == neighbours
    alone = environ.keys() == {"RANK", "WORLD_SIZE"}
    assert Place.of(environ, one_machine=False) == (Place(1, 3, machine=1) if alone else place)
