"""How often to save, and the share of the time that saving and failures take.

Failures come at random, on average one in `mtbf_s` seconds (M). Training works for `interval_s` (tau), stops for
`save_s` (C) to save, and so on. A failure throws away what was done since the last complete save; then it takes
`restart_s` (R) until training resumes, unless the next failure comes first.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, p. 303.
"""

from __future__ import annotations

import math

from labs.kit.errors import require


def optimum(save_s: float, mtbf_s: float) -> float:
    """The interval in seconds that minimises `lost_share`, whatever the restart takes.

    With x = tau / M the derivative is zero at (1 - x) exp(x + C / M) = 1, which Lambert's W solves.
    """
    from scipy.special import lambertw

    _check(save_s, mtbf_s)
    if save_s < 1e-8 * mtbf_s:  # below this, W is too imprecise
        return math.sqrt(2 * save_s * mtbf_s) - save_s
    return mtbf_s * (1 + float(lambertw(-math.exp(-1 - save_s / mtbf_s)).real))


def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Expected share of the time that is lost, in (0, 1]; failures may also strike while saving and restarting.

    A stretch of a seconds without a failure takes M (exp(a / M) - 1) seconds on average. Here a is tau + C for work
    and save, and R for each restart (Daly 2006, his complete model).
    """
    _check(save_s, mtbf_s, interval_s, restart_s)
    stretch = (interval_s + save_s) / mtbf_s
    running = math.exp(-restart_s / mtbf_s)  # share of the time that isn't spent on restarts
    if stretch > 500:  # exp() would overflow: no interval is ever finished
        return 1.0
    if stretch < 1e-150:  # failures are too rare to count, or mtbf_s is inf
        return save_s / (interval_s + save_s) + 1 - running
    return 1 - running * interval_s / mtbf_s / math.expm1(stretch)


def _check(save_s: float, mtbf_s: float, interval_s: float = 1.0, restart_s: float = 0.0) -> None:
    require(save_s > 0, f"save_s must be positive, not {save_s}: measure one save")
    require(mtbf_s > 0, f"mtbf_s must be positive, not {mtbf_s}")
    require(interval_s > 0, f"interval_s must be positive, not {interval_s}")
    require(restart_s >= 0, f"restart_s must not be negative, not {restart_s}")
