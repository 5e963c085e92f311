"""The model of the map, and the map itself."""

import pytest

from labs import crossover
from labs.common.timing.collectives import LatencyBandwidth
from labs.kit.launch import launch


def test_predict_by_hand():
    assert crossover.predict(1.0, 500, LatencyBandwidth(0.5, 1000.0), ranks=2) == pytest.approx(2 / (1 + 0.5 + 0.5))


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_cell_is_measured_and_modelled(nproc):
    run = launch("crossover", nproc=nproc, smoke=True, oversubscribe=True)
    rows = crossover.crossover_map(run)
    assert [(r["width"], r["batch"]) for r in rows] == [(64, 4), (64, 32), (256, 4), (256, 32)]
    assert all(0 < r["modelled"] <= nproc and r["measured"].value > 0 for r in rows)
    assert rows[0]["gradient_bytes"] == 4 * 3 * (64 * 64 + 64)
