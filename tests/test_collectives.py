"""nccl-tests' bandwidths and the latency-bandwidth fit."""

from __future__ import annotations

import numpy as np
import pytest

from labs.common.timing.collectives import algbw_b_s, bus_factor, busbw_b_s, fit
from labs.kit.errors import BadInput


@pytest.mark.parametrize(
    "op, n, factor",
    [("all_reduce", 1, 0), ("all_reduce", 2, 1), ("all_reduce", 8, 1.75), ("all_gather", 4, 0.75), ("broadcast", 8, 1)],
)
def test_bus_factor(op, n, factor):
    assert bus_factor(op, n) == factor


def test_bandwidths():
    assert algbw_b_s(1e9, 0.5) == 2e9 and busbw_b_s(1e9, 0.5, 4) == 3e9


def test_bad_input_names_the_fix():
    with pytest.raises(BadInput, match="all_gather"):
        bus_factor("gossip", 2)
    with pytest.raises(BadInput, match="at least 1"):
        bus_factor("all_reduce", 0)
    with pytest.raises(BadInput, match="two message sizes"):
        fit([1024, 1024], [1e-3, 1e-3])


def test_fit_recovers_latency_and_bandwidth_from_noisy_times():
    rng = np.random.default_rng(0)
    sizes = np.array([2.0**k for k in range(10, 25)])
    seconds = (5e-4 + sizes / 2e9) * rng.uniform(0.9, 1.1, len(sizes))
    model = fit(sizes, seconds)
    assert model.latency_s == pytest.approx(5e-4, rel=0.1) and model.b_s == pytest.approx(2e9, rel=0.1)
    assert model.seconds(model.half_bytes) == pytest.approx(2 * model.latency_s)


def test_fit_never_goes_negative():
    model = fit([1000, 2000, 4000], [3e-3, 2e-3, 1e-3])
    assert model.latency_s >= 0 and model.b_s > 0
