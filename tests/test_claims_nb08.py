"""Verdicts of notebook 08, from made-up records."""

import pytest

from labs.claims import nb08
from labs.kit.record import Record, Records


def tried(setting, computed, of=0, machine_0="DistNetworkError: EADDRINUSE"):
    case = {"setting": setting, "machine_0": machine_0, "machine_1": "still waits", "of": of}
    return Records([Record("two_nodes", "computed", "ranks", (computed,), case=case)])


@pytest.mark.parametrize(("computed", "word"), [(0, "depends"), (2, "holds")])
def test_a_taken_port_decides(computed, word):
    found = nb08.c04_a_fixed_port_sets_up_the_group(tried("port already taken", computed))
    assert found.word == word and ("DistNetworkError" in found.because) == (computed == 0)


@pytest.mark.parametrize("of", [1, 2])
def test_a_rank_alone_is_told_by_the_world_size(of):
    found = nb08.c21_rank_and_world_size_verify_the_setup(tried("clock five minutes slow", of, of))
    assert found.word == "depends" and ("1 of 2 ranks" in found.because) == (of == 1)


def test_another_run_decides_nothing():
    with pytest.raises(LookupError):
        nb08.c04_a_fixed_port_sets_up_the_group(tried("clock five minutes slow", 1, 1))
