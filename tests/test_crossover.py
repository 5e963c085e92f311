"""The model of the map, and the map itself."""

import pytest

from labs import crossover
from labs.kit.launch import launch


def test_fit_link_recovers_latency_and_bandwidth():
    sizes = [2**12, 2**16, 2**20, 2**23]
    latency, bandwidth = crossover.fit_link(sizes, [1e-4 + s / 2e9 for s in sizes])
    assert latency == pytest.approx(1e-4)
    assert bandwidth == pytest.approx(2e9)


def test_predict_by_hand():
    assert crossover.predict(1.0, 500, (0.5, 1000.0), ranks=2) == pytest.approx(2 / (1 + 0.5 + 0.5))


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_cell_is_measured_and_modelled(nproc):
    run = launch("crossover", nproc=nproc, smoke=True, oversubscribe=True)
    rows = crossover.crossover_map(run)
    assert [(r["width"], r["batch"]) for r in rows] == [(64, 4), (64, 32), (256, 4), (256, 32)]
    assert all(0 < r["modelled"] <= nproc and r["measured"].value > 0 for r in rows)
    assert rows[0]["gradient_bytes"] == 4 * 3 * (64 * 64 + 64)
