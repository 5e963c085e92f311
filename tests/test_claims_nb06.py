"""Verdict of notebook 06, from made-up records."""

import pytest

from labs.claims import nb06
from labs.kit.record import Record, Records


def idle(naive, four=0.2, ranks=2):
    shares = {1: naive, 4: four}
    return Records(
        Record(
            "pipeline_parallel",
            "idle_share",
            "1",
            [share * k for k in (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)],
            case={"schedule": "1f1b", "micro_batches": m},
            layout={"world_size": ranks},
        )
        for m, share in shares.items()
    )


@pytest.mark.parametrize(("naive", "word"), [(0.5, "does not hold"), (0.05, "holds"), (0.25, "depends")])
def test_the_naive_splits_idle_share_decides(naive, word):
    found = nb06.d18_both_halves_are_busy(idle(naive))
    assert found.word == word and "20 % with 4" in found.because


def test_four_stages_are_another_question():
    with pytest.raises(LookupError, match="nproc=2"):
        nb06.d18_both_halves_are_busy(idle(0.75, ranks=4))
