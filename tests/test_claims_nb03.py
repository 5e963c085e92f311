"""Verdicts of notebook 03, from made-up records."""

import pytest

from labs.claims import nb03
from labs.kit.record import Record, Records


def cell(width, batch_size, speedup):
    case = {"width": width, "batch_size": batch_size, "gradient_mb": 1.0}
    noise = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)
    return [
        Record("speedup_map", "step_s", "s", [s * k for k in noise], case={"way": way} | case, layout={"world_size": 2})
        for way, s in (("single", 0.01), ("ddp", 0.02 / speedup))
    ]


@pytest.mark.parametrize(
    ("function", "speedups", "word"),
    [
        (nb03.a20_ddp_makes_training_more_efficient, (1.2, 1.9), "holds"),
        (nb03.a20_ddp_makes_training_more_efficient, (0.5, 1.9), "depends"),
        (nb03.a20_ddp_makes_training_more_efficient, (0.5, 0.9), "does not hold"),
        (nb03.a21_choose_the_number_of_gpus, (0.5, 1.9), "holds"),
        (nb03.a21_choose_the_number_of_gpus, (1.2, 1.9), "depends"),
        (nb03.b46_speedup_stays_linear, (1.9, 1.95), "holds"),
        (nb03.b46_speedup_stays_linear, (1.2, 1.95), "does not hold"),
        (nb03.c27_small_batches_communicate_too_much, (0.5, 1.5), "holds"),
        (nb03.c27_small_batches_communicate_too_much, (1.5, 1.2), "does not hold"),
    ],
)
def test_the_map_decides(function, speedups, word):
    small, large = speedups
    assert function(Records(cell(64, 8, small) + cell(64, 512, large))).word == word


def rates(**speedup):
    return Records(
        Record(
            "data_parallel",
            "samples_per_s",
            "1/s",
            [100 * rate * k for k in (0.99, 1.0, 1.01)],
            case={"way": way},
            config={"model": model},
            provenance={"utc": model},
        )
        for model, ddp in speedup.items()
        for way, rate in (("single", 1.0), ("ddp", ddp))
    )


WORDS = [((1.5, 1.8), "holds"), ((0.5, 1.8), "depends"), ((0.5, 0.6), "does not hold")]


@pytest.mark.parametrize(("speedup", "word"), WORDS)
def test_an_epoch_gets_shorter_by_the_speedup(speedup, word):
    assert nb03.a13_more_gpus_shorten_an_epoch(rates(mlp=speedup[0], cnn=speedup[1])).word == word
