"""Young's and Daly's optimum: against Daly's published examples, against a numeric minimum, against a simulation."""

import math
import statistics

import pytest
from scipy.optimize import minimize_scalar

from labs.common.checkpoints import checkpoint_interval as ci
from labs.kit.errors import BadInput

MINUTE = 60.0


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_dalys_published_optima(mtbf_min, published_min):
    """Daly 2006, captions of figures 3 to 5: a save of 5 minutes, and this mean time between failures."""
    assert ci.daly(5 * MINUTE, mtbf_min * MINUTE) / MINUTE == pytest.approx(published_min, rel=0.01)


def test_young_by_hand():
    assert ci.young(5 * MINUTE, 24 * 60 * MINUTE) == pytest.approx(120 * MINUTE)


@pytest.mark.parametrize("save_s", [1e-4, 0.01, 1.0, 30.0, 300.0, 5000.0])
@pytest.mark.parametrize("restart_s", [0.0, 50.0])
def test_the_exact_optimum_is_the_minimum_of_the_lost_share(save_s, restart_s):
    mtbf_s = 1000.0
    best = ci.optimum(save_s, mtbf_s)
    at_best = ci.lost_share(best, save_s, mtbf_s, restart_s)
    found = minimize_scalar(
        lambda x: ci.lost_share(math.exp(x), save_s, mtbf_s, restart_s), bounds=(-4, 9), method="bounded"
    )
    assert at_best <= found.fun * (1 + 1e-9)
    assert math.exp(found.x) == pytest.approx(best, rel=0.01)
    assert all(ci.lost_share(best * f, save_s, mtbf_s, restart_s) > at_best for f in (0.5, 0.8, 1.2, 2.0))


@pytest.mark.parametrize("share", [1e-6, 1e-4, 1e-2])
def test_all_three_agree_while_a_save_is_short(share):
    exact = ci.optimum(share, 1.0)
    assert ci.young(share, 1.0) == pytest.approx(exact, rel=1.1 * math.sqrt(share))
    assert ci.daly(share, 1.0) == pytest.approx(exact, rel=share)
    assert abs(ci.daly(share, 1.0) - exact) < abs(ci.young(share, 1.0) - exact)


def test_where_failures_are_more_frequent_than_saves():
    assert ci.daly(3.0, 1.0) == 1.0
    assert ci.optimum(50.0, 1.0) == pytest.approx(1.0)
    assert ci.lost_share(1.0, 1000.0, 1.0) == 1.0  # and no overflow


def test_limits_of_the_lost_share():
    assert ci.lost_share(10.0, 1.0, 1e12) == pytest.approx(1 / 11)  # no failures: only saving
    assert ci.lost(10.0, 1e-12, 1e12).total == pytest.approx(0, abs=1e-9)
    assert ci.lost_share(1e5, 1.0, 100.0) == pytest.approx(1.0)  # never a whole interval
    small = {"interval_s": 100.0, "save_s": 0.5, "mtbf_s": 1e4, "restart_s": 3.0}
    assert ci.lost_share(**small) == pytest.approx(ci.first_order(**small), rel=0.01)


def test_no_failure_and_endless_restarts_are_told_apart():
    assert ci.lost(10.0, 1.0, math.inf) == ci.Lost(1 / 11, 0.0, 0.0)
    restarting = ci.lost(10.0, 1.0, 100.0, 1e6)  # a restart is hardly ever finished: that is where the time goes
    assert (restarting.saving, restarting.redone, restarting.restart) == (0.0, 0.0, 1.0)
    redoing = ci.lost(1e6, 1.0, 100.0, 100.0)
    assert redoing.restart == pytest.approx(1 - math.exp(-1)) and redoing.total == pytest.approx(1.0)


def test_the_parts_are_what_their_names_say():
    parts = ci.lost(100.0, 5.0, 1000.0, 20.0)
    assert parts.saving + parts.redone + parts.restart == pytest.approx(parts.total) and parts.total < 1
    # The share that is work times (tau + C) / tau is work and its saves.
    assert parts.saving == pytest.approx((1 - parts.total) * 5 / 100)
    assert ci.lost(100.0, 5.0, 1000.0).restart == 0


@pytest.mark.parametrize("interval_s", [20.0, 100.0, 400.0])
@pytest.mark.parametrize(
    ("save_s", "mtbf_s", "restart_s"), [(5.0, 1000.0, 0.0), (5.0, 1000.0, 60.0), (50.0, 100.0, 30.0)]
)
def test_simulated_failures_confirm_the_formula(interval_s, save_s, mtbf_s, restart_s):
    shares = ci.simulate(interval_s, save_s, mtbf_s, restart_s)
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    formula = ci.lost_share(interval_s, save_s, mtbf_s, restart_s)
    assert statistics.mean(shares) == pytest.approx(formula, abs=5 * error)
    assert error < 0.003
    assert shares == ci.simulate(interval_s, save_s, mtbf_s, restart_s), "the seed decides"
    assert shares != ci.simulate(interval_s, save_s, mtbf_s, restart_s, seed=1)


def test_the_simulated_minimum_is_where_the_formula_says():
    grid = ci.intervals(5.0, 1000.0, points=9, decades=0.8)
    shares = [statistics.mean(ci.simulate(t, 5.0, 1000.0, 60.0)) for t in grid]
    assert min(range(9), key=shares.__getitem__) == 4


def test_llama_3_by_hand():
    rows = ci.llama_3()
    assert rows.one("interruptions").kind == "published" and "2407.21783" in ci.LLAMA_3
    assert rows.one("mtbf_s", gpus=16_384).value / 3600 == pytest.approx(3.09, abs=0.01)
    assert rows.one("mtbf_s", gpus=1).value / (365.25 * ci.DAY_S) == pytest.approx(5.78, abs=0.01)


@pytest.mark.parametrize("values", [(0, 1), (1, 0), (-1, 1)])
def test_bad_input(values):
    for function in (ci.young, ci.daly, ci.optimum):
        with pytest.raises(BadInput, match="must be positive"):
            function(*values)
    with pytest.raises(BadInput, match="interval_s"):
        ci.lost_share(0, 1, 1)
    with pytest.raises(BadInput, match="restart_s"):
        ci.simulate(1, 1, 1, -1)
    with pytest.raises(BadInput, match="points"):
        ci.intervals(1, 1, points=4)
