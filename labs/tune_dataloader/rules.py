"""The decisions of `tuning`, as pure functions of rates in samples per second: when to stop, what to compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from labs.common.loading.feed import expected
from labs.kit.measure import Estimate, differs, paired_ratio

CLOSE = 0.03  # a cheaper setting whose median rate is lower by no more is taken
TOLERANCE = 0.05  # most that it may lose; to gain less than that, no more workers are tried
CLEARLY = 1.3  # a loader that is this much faster than the model: more workers cannot help
GAIN = 1.1  # what twice as many workers must bring to go on
NEAR = 0.75  # of the best that is expected: below this a setting need not be compared
FEWEST, ENOUGH = 3, 6  # rounds; from ENOUGH on there are bootstrap intervals, see labs.kit.measure.estimate
DOUBT = 1.5  # in place of an interval: two turns may differ by this factor because a machine is busy


class Setting(NamedTuple):
    """What the tuner chooses; settings are ordered by their cost: processes first, then batches held in memory."""

    workers: int
    prefetch: int = 2

    def __str__(self) -> str:
        """As one writes it in Python; the default prefetch_factor is left out."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments for DataLoader."""
        extra = {"prefetch_factor": self.prefetch} if self.workers and self.prefetch != 2 else {}
        return {"num_workers": self.workers, **extra}


def ladder(most: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and `most` itself: numbers of workers to try, in this order."""
    doubling = [0, *(2**i for i in range(most.bit_length()))]
    return [*(w for w in doubling if w < most), most]


def reason_to_stop(model: float, loaders: Mapping[int, float], most: int) -> str:
    """Why more workers than those in `loaders` (rates of the loader alone, in order) cannot help; "" if they may.

    From 0 to 1 worker nothing needs to be gained: the same work moves to another process, and two may pay. From then
    on no doubling is taken to bring more than the one before it, so what `most` workers reach is bounded, too.
    """
    *before, last = loaders
    best = max(expected(model, rate, w) for w, rate in loaders.items())
    if loaders[last] >= CLEARLY * model if last else best >= (1 - CLOSE / 2) * model:
        return "faster than the model"
    if last < 2:
        return ""
    gain = loaders[last] / loaders[before[-1]]
    if gain < GAIN:
        return "no gain"
    reachable = loaders[last] * gain ** math.log2(max(most, last) / last)
    return "cannot catch up" if reachable < NEAR * best else ""


def cheapest_expected(model: float, loaders: Mapping[int, float]) -> int:
    """Fewest workers that are CLOSE to the best, if model and loader disturb each other in nothing."""
    rates = {w: expected(model, rate, w) for w, rate in loaders.items()}
    return min(w for w in rates if rates[w] >= (1 - CLOSE) * max(rates.values()))


def finalists(model: float, loaders: Mapping[int, float]) -> list[int]:
    """Numbers of workers that are to be compared with model and loader together, cheapest first.

    These are the cheapest that should do, from the rates alone, and its neighbours among those tried, unless they
    cannot reach it: nothing is faster together than alone. No workers are compared with one, since whether there is a
    core for it no rate of the loader alone can tell.
    """
    rates = {w: expected(model, rate, w) for w, rate in loaders.items()}
    choice = cheapest_expected(model, loaders)
    near = [w for w in rates if rates[w] >= NEAR * max(rates.values())]
    below = [w for w in near if w < choice][-1:] or [w for w in rates if w < choice == 1]
    return [*below, choice, *[w for w in near if w > choice][:1]]


def one_more(choice: int, model: float, loaders: Mapping[int, float], most: int, reached: float) -> int | None:
    """The next number of workers, beyond those tried, that could still be faster; None if there is none.

    `reached` is the rate of the choice over that of the model alone, which nothing exceeds.
    """
    beyond = [w for w in ladder(most) if w > max(choice, *loaders)]
    hopeless = choice < max(loaders) or reason_to_stop(model, loaders, most) == "no gain" or reached >= 1 - TOLERANCE
    return None if hopeless or not beyond else beyond[0]


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """a / b, turn by turn, with an interval.

    With fewer than ENOUGH pairs it is their range, on both sides widened by as much again: more than a t-interval. One
    or two say nothing about noise: DOUBT stands in for it.
    """
    if len(a) >= ENOUGH:
        return paired_ratio(a, b, resamples=999)
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    low, high = min(ratios), max(ratios)
    more = high / low if len(a) >= FEWEST else DOUBT
    return Estimate(statistics.median(ratios), low / more, high * more, len(ratios), "x")


class Choice(NamedTuple):
    """The cheapest setting that may be as good as the best, and what the samples say about that."""

    setting: Setting
    best: Setting
    share: Estimate | None
    """Rate of the setting against that of the best; None if there was no time to compare them."""
    sure: bool
    """Whether FEWEST rounds or more show that cheaper ones are slower and that dearer ones gain less than TOLERANCE."""


def may_be_as_good(share: Estimate) -> bool:
    """Whether `share` of the best rate is CLOSE to it, or within TOLERANCE and no difference that samples can show."""
    return share.value >= 1 - CLOSE or (share.value >= 1 - TOLERANCE and not differs(share))


def cheapest(rates: Mapping[Setting, Sequence[float]]) -> Choice:
    """Choose from rates that were taken in turn, one of each setting per round."""
    best = max(rates, key=lambda s: statistics.median(rates[s]))
    shares = {s: ratio(rates[s], rates[best]) for s in sorted(rates)}
    setting = next(s for s, share in shares.items() if s == best or may_be_as_good(share))
    cheaper_lose = all(shares[s].high < 1 for s in rates if s < setting)
    keeps_up = all(ratio(rates[setting], rates[s]).low >= 1 - TOLERANCE for s in rates if s > setting)
    return Choice(setting, best, shares[setting], len(rates[best]) >= FEWEST and cheaper_lose and keeps_up)


def limit(loader_to_model: Estimate) -> str:
    """What the pipeline waits for, from the rate of the loader alone over that of the model alone."""
    if not differs(loader_to_model):
        return "neither by more than noise"
    return "loader" if loader_to_model.value < 1 else "model"


def is_bursty(model: float, loader: float, waits_s: Sequence[float], works_s: Sequence[float]) -> bool:
    """Whether the queue runs empty now and then although the loader is fast enough on average.

    From the seconds of single steps: most hardly wait, and few wait for long. A deeper queue (prefetch_factor) helps
    only there. Handing a batch over takes its time in every step.
    """
    together_s = sum(waits_s) + sum(works_s)
    if not together_s:
        return False
    share = sum(waits_s) / together_s
    concentrated = statistics.median(waits_s) < statistics.fmean(waits_s) / 2
    return loader >= GAIN * model and share > TOLERANCE and concentrated
