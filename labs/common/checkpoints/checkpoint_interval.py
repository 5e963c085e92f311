"""How often to save: the optimum interval of Young (1974) and Daly (2006), the share of time lost, and a simulation.

Failures come at random, on average one in `mtbf_s` seconds (mean time between failures M), and do not remember the
last one. Training works for `interval_s` (tau), stops for `save_s` (C) to save, and so on. A failure throws away what
was done since the last save was complete, also half a save; then it takes `restart_s` (R) until training goes on,
unless the next failure comes first. Every number made here is `modelled`.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974, p. 530.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, p. 303.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from labs.kit.errors import require
from labs.kit.record import Record, Records

DAY_S = 86_400.0
LLAMA_3 = (
    "Llama Team, The Llama 3 Herd of Models, arXiv:2407.21783 (2024), section 3.3.4: 466 interruptions in 54 days of"
    " pre-training the 405B model, 419 of them unexpected, on 16K H100 GPUs: 16,384 by its table 4"
)


def young(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves, sqrt(2 C M): right while C is far below M."""
    _check(save_s, mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves, with Daly's next two terms; M itself from C = 2 M on."""
    _check(save_s, mtbf_s)
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def optimum(save_s: float, mtbf_s: float) -> float:
    """The interval that minimises `lost_share`, exactly. The restart time does not matter: no interval avoids it.

    With x = tau / M the derivative is zero at (1 - x) exp(x + C / M) = 1, which Lambert's W solves.
    """
    from scipy.special import lambertw

    _check(save_s, mtbf_s)
    if save_s < 1e-8 * mtbf_s:  # the digits of W end here, and Daly's next terms are below them
        return daly(save_s, mtbf_s)
    return mtbf_s * (1 + float(lambertw(-math.exp(-1 - save_s / mtbf_s)).real))


@dataclass(frozen=True)
class Lost:
    """Shares of the wall clock that bring training no further; expected values, in [0, 1]."""

    saving: float
    redone: float
    """Work, and begun saves, that a failure threw away."""
    restart: float

    @property
    def total(self) -> float:
        """What is left to training is 1 - total."""
        return self.saving + self.redone + self.restart


def lost(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> Lost:
    """Where the time goes. Exact for exponential failures, which may also strike while saving and restarting.

    A stretch of a seconds without a failure takes M (exp(a / M) - 1) seconds on average, and exp(a / M) - 1
    failed attempts. Here a is tau + C for work and save, and R for each restart (Daly 2006, his complete model).
    """
    _check(save_s, mtbf_s, interval_s, restart_s)
    stretch = (interval_s + save_s) / mtbf_s
    running = math.exp(-restart_s / mtbf_s)  # share of the time that is not spent on restarts
    if stretch > 500:  # exp() would overflow: no interval is ever finished
        return Lost(0.0, running, 1 - running)
    if stretch < 1e-150:  # failures are too rare to count, or mtbf_s is inf
        return Lost(save_s / (interval_s + save_s), 0.0, 1 - running)
    failures = math.expm1(stretch)  # per interval; it takes M times as long
    saving, redone = save_s / mtbf_s / failures, 1 - stretch / failures
    return Lost(saving * running, redone * running, 1 - running)


def lost_share(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Share of the wall clock that is lost at this interval, in (0, 1]."""
    return lost(interval_s, save_s, mtbf_s, restart_s).total


def first_order(interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """The same share as one does it on paper: C / tau + tau / 2M + R / M, where all three are small."""
    _check(save_s, mtbf_s, interval_s, restart_s)
    return save_s / interval_s + interval_s / (2 * mtbf_s) + restart_s / mtbf_s


def simulate(
    interval_s: float,
    save_s: float,
    mtbf_s: float,
    restart_s: float = 0.0,
    *,
    failures: int = 20_000,
    repeats: int = 8,
    seed: int = 0,
) -> list[float]:
    """Lost share in each of `repeats` simulated trainings with `failures` failures at random moments.

    Nothing of the formula is in it: between two failures there is first the restart, then as many whole rounds of
    work and save as fit; only their work counts.
    """
    _check(save_s, mtbf_s, interval_s, restart_s)
    gaps_s = np.random.default_rng(seed).exponential(mtbf_s, (repeats, failures))
    rounds = np.floor(np.maximum(gaps_s - restart_s, 0) / (interval_s + save_s))
    return (1 - interval_s * rounds.sum(axis=1) / gaps_s.sum(axis=1)).tolist()


def intervals(save_s: float, mtbf_s: float, points: int = 61, decades: float = 1.5) -> list[float]:
    """Intervals in s on a logarithmic scale, `decades` to both sides of the optimum, which is one of them."""
    require(points >= 3 and points % 2 == 1, f"points must be odd and at least 3, not {points}")
    best = optimum(save_s, mtbf_s)
    return [best * 10**x for x in np.linspace(-decades, decades, points).tolist()]


def llama_3() -> Records:
    """The published failures of one training, and the mean time between failures that follows from them.

    interruptions (`published`), mtbf_s of the whole job and of one GPU (`modelled`: 54 days / 419, times 16,384).
    """
    days, gpus, unexpected = 54, 16_384, 419
    mtbf_s = days * DAY_S / unexpected
    source, case = {"source": LLAMA_3}, {"gpus": gpus, "days": days}
    return Records(
        [
            Record("paper", "interruptions", "1", (unexpected,), "published", case, provenance=source),
            Record("paper", "mtbf_s", "s", (mtbf_s,), "modelled", {"gpus": gpus}, provenance=source),
            Record("paper", "mtbf_s", "s", (mtbf_s * gpus,), "modelled", {"gpus": 1}, provenance=source),
        ]
    )


def _check(save_s: float, mtbf_s: float, interval_s: float = 1.0, restart_s: float = 0.0) -> None:
    require(save_s > 0, f"save_s must be positive, not {save_s}: measure one save")
    require(mtbf_s > 0, f"mtbf_s must be positive, not {mtbf_s}")
    require(interval_s > 0, f"interval_s must be positive, not {interval_s}")
    require(restart_s >= 0, f"restart_s must not be negative, not {restart_s}")
