"""Typical mistakes in notebook 02: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from statistics import fmean, median

import numpy as np
import torch
from torch.utils.data import get_worker_info

from labs.kit.measure import differs, estimate, paired_ratio

MADE_OUTSIDE = np.random.default_rng(0)


def _dataset():
    return get_worker_info().dataset


def _nothing(worker_id):
    pass


def _fixed_seed(worker_id):
    _dataset().rng = np.random.default_rng(42)


def _id_only(worker_id):
    _dataset().rng = np.random.default_rng(42 + worker_id)


def _clock(worker_id):
    _dataset().rng = np.random.default_rng(time.time_ns() + worker_id)


def _made_in_the_main_process(worker_id):
    _dataset().rng = MADE_OUTSIDE


def _global_only(worker_id):
    np.random.seed(torch.initial_seed() % 2**32)


def _global_with_64_bits(worker_id):
    np.random.seed(torch.initial_seed())


def _base_seed(worker_id):
    _dataset().rng = np.random.default_rng(torch.initial_seed() - worker_id)


def _seeds_that_collide(worker_id):
    _dataset().rng = np.random.default_rng(torch.initial_seed() - worker_id + worker_id // 2)


def _returned(worker_id):
    return np.random.default_rng(torch.initial_seed())


def _wrong_name(worker_id):
    _dataset().generator = np.random.default_rng(torch.initial_seed())


def _spawned(worker_id):
    info = get_worker_info()
    info.dataset.rng = info.dataset.rng.spawn(info.num_workers)[worker_id]


def _old_generator(worker_id):
    _dataset().rng = np.random.RandomState(torch.initial_seed() % 2**32)


def _seeds_a_generator(worker_id):
    _dataset().rng.seed(torch.initial_seed())


def _global_dataset(worker_id):
    dataset.rng = np.random.default_rng(torch.initial_seed())  # noqa: F821


def _resets_torch(worker_id):
    _dataset().rng = np.random.default_rng(torch.initial_seed())
    torch.manual_seed(0)


def _unseeds_numpy(worker_id):
    _dataset().rng = np.random.default_rng(torch.initial_seed())
    np.random.seed()


def _named(model_s, loader_s, ratio):
    if not differs(ratio):
        return "neither"
    return "loader" if ratio.value > 1 else "model"


def _limit(model_s, loader_s):
    return _named(model_s, loader_s, paired_ratio(loader_s, model_s))


def _sum(model_s, loader_s):
    return _limit(model_s, loader_s), median(model_s) + median(loader_s)


def _faster_one_expected(model_s, loader_s):
    return _limit(model_s, loader_s), min(median(model_s), median(loader_s))


def _average(model_s, loader_s):
    return _limit(model_s, loader_s), (median(model_s) + median(loader_s)) / 2


def _mean_expected(model_s, loader_s):
    return _limit(model_s, loader_s), max(fmean(model_s), fmean(loader_s))


def _slowest_step(model_s, loader_s):
    return _limit(model_s, loader_s), max(*model_s, *loader_s)


def _milliseconds(model_s, loader_s):
    return _limit(model_s, loader_s), 1e3 * max(median(model_s), median(loader_s))


def _steps_per_s(model_s, loader_s):
    return _limit(model_s, loader_s), 1 / max(median(model_s), median(loader_s))


def _always_the_loader_expected(model_s, loader_s):
    return _limit(model_s, loader_s), median(loader_s)


def _names_swapped(model_s, loader_s):
    return _named(model_s, loader_s, paired_ratio(model_s, loader_s)), max(median(model_s), median(loader_s))


def _means_compared(model_s, loader_s):
    a, b = fmean(model_s), fmean(loader_s)
    return ("loader" if b > a else "model"), max(a, b)


def _noise_ignored(model_s, loader_s):
    a, b = median(model_s), median(loader_s)
    return ("loader" if b > a else "model"), max(a, b)


def _fixed_margin(model_s, loader_s):
    a, b = median(model_s), median(loader_s)
    name = "neither" if abs(a - b) < 0.1 * max(a, b) else "loader" if b > a else "model"
    return name, max(a, b)


def _unpaired_intervals(model_s, loader_s):
    a, b = estimate(model_s), estimate(loader_s)
    name = "loader" if b.low > a.high else "model" if a.low > b.high else "neither"
    return name, max(a.value, b.value)


def _ranges_of_all_samples(model_s, loader_s):
    name = "loader" if min(loader_s) > max(model_s) else "model" if min(model_s) > max(loader_s) else "neither"
    return name, max(median(model_s), median(loader_s))


def _never_decides(model_s, loader_s):
    return "neither", max(median(model_s), median(loader_s))


def _turned_round(model_s, loader_s):
    return max(median(model_s), median(loader_s)), _limit(model_s, loader_s)


def _other_words(model_s, loader_s):
    return "data", max(median(model_s), median(loader_s))


def _name_only(model_s, loader_s):
    return _limit(model_s, loader_s)


def _best(rates, typical=median):
    return max(rates, key=lambda s: typical(rates[s]))


def _within(rates, best, tolerance):
    return [s for s in rates if paired_ratio(rates[s], rates[best]).high >= 1 - tolerance]


def _fastest(rates, tolerance):
    return _best(rates)


def _most_expensive(rates, tolerance):
    return list(rates)[-1]


def _first_of_all(rates, tolerance):
    return next(iter(rates))


def _better_than_average(rates, tolerance):
    average = fmean(median(r) for r in rates.values())
    return next(s for s in rates if median(rates[s]) > average)


def _noise_without_tolerance(rates, tolerance):
    return _within(rates, _best(rates), 0)[0]


def _tolerance_always_3_percent(rates, tolerance):
    return _within(rates, _best(rates), 0.03)[0]


def _medians_without_noise(rates, tolerance):
    best = median(rates[_best(rates)])
    return next(s for s in rates if median(rates[s]) >= (1 - tolerance) * best)


def _best_by_its_luckiest_sample(rates, tolerance):
    return _within(rates, _best(rates, max), tolerance)[0]


def _means(rates, tolerance):
    best = max(fmean(r) for r in rates.values())
    return next(s for s in rates if fmean(rates[s]) >= (1 - tolerance) * best)


def _stops_at_the_first_dip(rates, tolerance):
    settings = list(rates)
    for here, after in pairwise(settings):
        if paired_ratio(rates[after], rates[here]).low <= 1 + tolerance:
            return here
    return settings[-1]


def _walks_down_from_the_best(rates, tolerance):
    best, settings = _best(rates), list(rates)
    good, here = _within(rates, best, tolerance), settings.index(best)
    while here and settings[here - 1] in good:
        here -= 1
    return settings[here]


def _unpaired(rates, tolerance):
    best = estimate(rates[_best(rates)])
    return next(s for s in rates if estimate(rates[s]).high >= (1 - tolerance) * best.low)


def _fewest_workers(rates, tolerance):
    return min(_within(rates, _best(rates), tolerance), key=lambda s: s[0])


def _index(rates, tolerance):
    return list(rates).index(_within(rates, _best(rates), tolerance)[0])


def _all_that_are_good(rates, tolerance):
    return _within(rates, _best(rates), tolerance)


def _worker():
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _everything(shards, rank, world_size):
    return shards


def _by_worker_only(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[worker_id::num_workers]


def _by_rank_only(shards, rank, world_size):
    return shards[rank::world_size]


def _none_not_expected(shards, rank, world_size):
    info = get_worker_info()
    return shards[rank::world_size][info.id :: info.num_workers]


def _alone_in_the_job(shards, rank, world_size):
    info = get_worker_info()
    return shards if info is None else shards[rank::world_size][info.id :: info.num_workers]


def _nothing_without_workers(shards, rank, world_size):
    info = get_worker_info()
    return [] if info is None else shards[rank::world_size][info.id :: info.num_workers]


def _blocks_without_the_rest(shards, rank, world_size):
    worker_id, num_workers = _worker()
    size = len(shards) // (world_size * num_workers)
    k = rank * num_workers + worker_id
    return shards[k * size : (k + 1) * size]


def _blocks_rounded_up(shards, rank, world_size):
    worker_id, num_workers = _worker()
    size = -(-len(shards) // (world_size * num_workers))
    k = rank * num_workers + worker_id
    return shards[k * size : (k + 1) * size]


def _rest_to_the_last(shards, rank, world_size):
    worker_id, num_workers = _worker()
    n, k = world_size * num_workers, rank * num_workers + worker_id
    size = len(shards) // n
    return shards[k * size :] if k == n - 1 else shards[k * size : (k + 1) * size]


def _workers_of_a_rank_first(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[rank * num_workers + worker_id :: world_size * num_workers]


def _from_one(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[1:][rank::world_size][worker_id::num_workers]


def _ids_added(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[rank + worker_id :: world_size * num_workers]


def _step_of_the_ranks_only(shards, rank, world_size):
    worker_id, _ = _worker()
    return shards[rank + worker_id :: world_size]


def _factors_swapped(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[worker_id * num_workers + rank :: world_size * num_workers]


def _shuffled_by_each(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return random.sample(shards, len(shards))[rank::world_size][worker_id::num_workers]


def _indices(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return range(len(shards))[rank::world_size][worker_id::num_workers]


MUTANTS = {
    "02.1": {
        "nothing": (_nothing, "as it was in the main process"),
        "a fixed seed": (_fixed_seed, "your seed is the same for all of them"),
        "worker id only": (_id_only, "nothing that is new in an epoch"),
        "the clock": (_clock, "a second run with the same torch seed"),
        "made in the main process": (_made_in_the_main_process, "made before the workers were"),
        "global generator only": (_global_only, "which torch does anyway"),
        "global generator with 64 bits": (_global_with_64_bits, "takes 32 bits"),
        "base seed without the id": (_base_seed, "new in every epoch, but not in every worker"),
        "seeds that collide": (_seeds_that_collide, "workers 0 and 1 draw the same"),
        "returned": (_returned, "throws away what worker_init returns"),
        "wrong name": (_wrong_name, "you set dataset.generator"),
        "spawned from the copy": (_spawned, "still come from dataset.rng"),
        "RandomState": (_old_generator, "dataset.rng is a RandomState now"),
        "seed() of a generator": (_seeds_a_generator, "a NumPy Generator has no seed()"),
        "dataset not found": (_global_dataset, "your code does not find the dataset"),
        "resets torch": (_resets_torch, "you also reset torch"),
        "unseeds NumPy": (_unseeds_numpy, "not to the same in a second run"),
    },
    "02.2": {
        "sum": (_sum, "you add the two times"),
        "the faster one": (_faster_one_expected, "the time of the faster one"),
        "average of the two": (_average, "the average of the two"),
        "mean expected": (_mean_expected, "a single step of 1.5 s moves it"),
        "slowest step": (_slowest_step, "the slowest step of all"),
        "milliseconds": (_milliseconds, "milliseconds"),
        "steps per second": (_steps_per_s, "steps per second"),
        "always the loader's time": (_always_the_loader_expected, "slow model"),
        "names swapped": (_names_swapped, "the faster of the two"),
        "means compared": (_means_compared, 'you answer "loader": one step'),
        "noise ignored": (_noise_ignored, "cannot show that"),
        "fixed margin": (_fixed_margin, "by 4 % with 0.3 % of noise"),
        "unpaired intervals": (_unpaired_intervals, "took twice as long for both"),
        "ranges of all samples": (_ranges_of_all_samples, 'you answer "neither": one step'),
        "never decides": (_never_decides, 'you answer "neither", not "loader"'),
        "turned round": (_turned_round, "the name comes first"),
        "other words": (_other_words, "'data' is none of"),
        "name only": (_name_only, "not a name and a number"),
    },
    "02.3": {
        "fastest": (_fastest, "you choose (4, 2), the fastest"),
        "most expensive": (_most_expensive, "(8, 2), the most expensive"),
        "first of all": (_first_of_all, "the cheapest, fast or not"),
        "better than average": (_better_than_average, "better than the average"),
        "tolerance ignored": (_noise_without_tolerance, "not shown to be slower at all"),
        "tolerance always 3 %": (_tolerance_always_3_percent, "use tolerance"),
        "noise ignored": (_medians_without_noise, "a median alone hides"),
        "best by its luckiest sample": (_best_by_its_luckiest_sample, "you choose (1, 2). It has"),
        "means": (_means, "you choose (8, 2). (2, 2) is cheaper"),
        "stops at the first dip": (_stops_at_the_first_dip, "must not end where one step is not uphill"),
        "walks down from the best": (_walks_down_from_the_best, "do not walk down"),
        "unpaired": (_unpaired, "compare round by round"),
        "fewest workers": (_fewest_workers, "the fewest workers"),
        "index": (_index, "2 is none of the settings"),
        "all that are good": (_all_that_are_good, "is none of the settings"),
    },
    "02.4": {
        "everything": (_everything, "all 6 processes"),
        "by worker only": (_by_worker_only, "the ranks read the same"),
        "by rank only": (_by_rank_only, "the workers of a rank read the same"),
        "None not expected": (_none_not_expected, "get_worker_info() returns None"),
        "alone in the job": (_alone_in_the_job, "alone on its rank, not in the job"),
        "nothing without workers": (_nothing_without_workers, "nobody reads anything"),
        "blocks without the rest": (_blocks_without_the_rest, "nobody reads tiles-06"),
        "blocks rounded up": (_blocks_rounded_up, "the workers of rank 1 read 2, 2 and 0"),
        "rest to the last": (_rest_to_the_last, "1, 1 and 5"),
        "workers of a rank first": (_workers_of_a_rank_first, "the ranks read 6 and 4"),
        "from one": (_from_one, "count from 0"),
        "ids added": (_ids_added, "both read"),
        "step of the ranks only": (_step_of_the_ranks_only, "both read"),
        "factors swapped": (_factors_swapped, "both read"),
        "shuffled by each": (_shuffled_by_each, "asked twice"),
        "indices": (_indices, "not a list of shards"),
    },
}  # fmt: skip
