"""The best checkpoint interval: against Daly's published examples, a numeric minimum, and simulated failures."""

import math
import statistics

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from labs.common.checkpoints import checkpoint_interval as ci
from labs.kit.errors import BadInput

MINUTE = 60.0


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_published_optima(mtbf_min, published_min):
    """Daly 2006, captions of figures 3 to 5: a save of 5 minutes, and this mean time between failures."""
    assert ci.optimum(5 * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(published_min, rel=0.03)


@pytest.mark.parametrize("save_s", [1e-6, 0.01, 1.0, 30.0, 300.0, 5000.0])
@pytest.mark.parametrize("restart_s", [0.0, 50.0])
def test_the_optimum_is_the_minimum_of_the_lost_share(save_s, restart_s):
    best = ci.optimum(save_s, 1000.0)
    at_best = ci.lost_share(best, save_s, 1000.0, restart_s)
    found = minimize_scalar(
        lambda x: ci.lost_share(math.exp(x), save_s, 1000.0, restart_s), bounds=(-4, 9), method="bounded"
    )
    assert at_best <= found.fun * (1 + 1e-9)
    assert all(ci.lost_share(best * f, save_s, 1000.0, restart_s) > at_best for f in (0.5, 0.8, 1.2, 2.0))


def test_limits_of_the_lost_share():
    assert ci.lost_share(10.0, 1.0, 1e12) == pytest.approx(1 / 11)  # no failures: only saving
    assert ci.lost_share(10.0, 1.0, math.inf) == pytest.approx(1 / 11)
    assert ci.lost_share(1e5, 1.0, 100.0) == ci.lost_share(1.0, 1000.0, 1.0) == 1.0  # and no overflow
    assert ci.lost_share(100.0, 0.5, 1e4, 3.0) == pytest.approx(0.5 / 100 + 100 / 2e4 + 3 / 1e4, rel=0.01)


@pytest.mark.parametrize("interval_s", [20.0, 400.0])
@pytest.mark.parametrize(("save_s", "mtbf_s", "restart_s"), [(5.0, 1000.0, 60.0), (50.0, 100.0, 30.0)])
def test_simulated_failures_confirm_the_formula(interval_s, save_s, mtbf_s, restart_s):
    """Between two failures: the restart, then as many whole rounds of work and save as fit; only work counts."""
    gaps_s = np.random.default_rng(0).exponential(mtbf_s, (8, 20_000))
    rounds = np.floor(np.maximum(gaps_s - restart_s, 0) / (interval_s + save_s))
    shares = (1 - interval_s * rounds.sum(axis=1) / gaps_s.sum(axis=1)).tolist()
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert statistics.mean(shares) == pytest.approx(ci.lost_share(interval_s, save_s, mtbf_s, restart_s), abs=5 * error)


def test_bad_input():
    for values in ((0, 1), (1, 0)):
        with pytest.raises(BadInput, match="must be positive"):
            ci.optimum(*values)
    with pytest.raises(BadInput, match="interval_s"):
        ci.lost_share(0, 1, 1)
