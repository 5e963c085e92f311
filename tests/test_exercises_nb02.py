"""Checkers of notebook 02: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
import torch
from speeds import first
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, get_worker_info

from labs.chapters.nb02 import solutions as solution
from labs.kit.check import examine
from labs.kit.measure import differs, estimate, paired_ratio


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def by_logarithms(model_s, loader_s):
    interval = estimate([math.log(b / a) for a, b in zip(model_s, loader_s, strict=True)])
    name = "loader" if interval.low > 0 else "model" if interval.high < 0 else "neither"
    return name, np.maximum(np.median(model_s), np.median(loader_s))


def the_other_way_round(model_s, loader_s):
    ratio = paired_ratio(model_s, loader_s)
    name = ("model" if ratio.value > 1 else "loader") if differs(ratio) else "neither"
    return [name, max(median(model_s), median(loader_s))]


@pytest.mark.parametrize("right", [by_logarithms, the_other_way_round])
def test_other_ways_to_name_the_limit_pass(right):
    passes("02.2", right)


@pytest.mark.parametrize("percent", [1, 3, 10])
def test_no_fixed_margin_passes(percent):
    def limit(model_s, loader_s):
        ratio = paired_ratio(loader_s, model_s).value
        name = "loader" if ratio > 1 + percent / 100 else "model" if ratio < 1 / (1 + percent / 100) else "neither"
        return name, max(median(model_s), median(loader_s))

    assert "no fixed margin" in examine("02.2", limit).text


def test_sorting_before_pairing_is_told():
    text = examine("02.2", lambda model_s, loader_s: solution.limit(sorted(model_s), sorted(loader_s))).text
    assert "you sort the samples before you pair them" in text


def test_the_low_end_for_the_high_end_is_told():
    def cheapest(rates, tolerance):
        best = max(rates, key=lambda s: median(rates[s]))
        return next(s for s in rates if s == best or paired_ratio(rates[s], rates[best]).low >= 1 - tolerance)

    assert "by the low end of its interval" in examine("02.3", cheapest).text


def from_the_dearest_on(rates, tolerance):
    best = max(rates, key=lambda s: np.median(rates[s]))
    return [s for s in reversed(rates) if paired_ratio(rates[best], rates[s]).low <= 1 / (1 - tolerance)][-1]


def losses_in_percent(rates, tolerance):
    best = sorted(rates, key=lambda s: -median(rates[s]))[0]
    loss = {s: 100 * (1 - paired_ratio(rates[s], rates[best]).high) for s in rates}
    return next(s for s in loss if loss[s] <= 100 * tolerance)


@pytest.mark.parametrize("right", [from_the_dearest_on, losses_in_percent])
def test_other_ways_to_choose_pass(right):
    passes("02.3", right)


def by_a_list_of_numbers(dataset, batch_size, rank, world_size, epoch, seed):
    order = np.random.default_rng([seed, epoch]).permutation(len(dataset)).tolist()[rank::world_size]

    def renew(worker_id):
        get_worker_info().dataset.rng = np.random.default_rng(get_worker_info().seed)

    own = torch.Generator().manual_seed(hash((seed, epoch, rank)) % 2**63)
    return DataLoader(dataset, batch_size, sampler=order, num_workers=2, worker_init_fn=renew, generator=own)


def by_a_batch_sampler(dataset, batch_size, rank, world_size, epoch, seed):
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=100 * seed + epoch)
    batches = BatchSampler(sampler, batch_size, drop_last=True)

    def renew(worker_id):
        worker = torch.utils.data.get_worker_info()
        worker.dataset.rng = np.random.Generator(np.random.PCG64([seed, rank, epoch, worker.id]))

    return DataLoader(dataset, batch_sampler=batches, num_workers=2, worker_init_fn=renew)


@pytest.mark.parametrize("right", first(1, [by_a_list_of_numbers, by_a_batch_sampler]))
def test_other_loaders_for_a_rank_pass(right):
    passes("02.1", right)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_workers": 0}, "num_workers=0"), ({"drop_last": True, "num_workers": 2}, "")],
)
def test_what_is_asked_of_the_loader_and_what_is_not(options, words):
    def loader(dataset, batch_size, rank, world_size, epoch, seed):
        made = solution.rank_loader(dataset, batch_size, rank, world_size, epoch, seed)
        return DataLoader(dataset, batch_size, sampler=made.sampler, worker_init_fn=made.worker_init_fn, **options)

    outcome = examine("02.1", loader)
    assert words in outcome.text and (outcome.state == "passed") is not bool(words)


def test_ranks_and_epochs_that_add_up_to_the_same_seed_are_told():
    def loader(dataset, batch_size, rank, world_size, epoch, seed):
        made = solution.rank_loader(dataset, batch_size, rank, world_size, epoch, seed)

        def renew(worker_id):
            get_worker_info().dataset.rng = np.random.default_rng([seed + rank + epoch, worker_id])

        return DataLoader(dataset, batch_size, sampler=made.sampler, num_workers=2, worker_init_fn=renew)

    assert "is the same for (0, 1) and (1, 0)" in examine("02.1", loader).text


def test_torchs_global_generator_is_left_alone():
    def loader(dataset, batch_size, rank, world_size, epoch, seed):
        torch.manual_seed(seed + rank)
        return solution.rank_loader(dataset, batch_size, rank, world_size, epoch, seed)

    assert "torch's global generator" in examine("02.1", loader).text


def by_global_number(shards, rank, world_size):
    worker, workers = (0, 1) if (info := get_worker_info()) is None else (info.id, info.num_workers)
    return [s for i, s in enumerate(shards) if i % (world_size * workers) == worker * world_size + rank]


def rank_by_rank(shards, rank, world_size):
    mine = [s for i, s in enumerate(shards) if i % world_size == rank]
    info = get_worker_info()
    return iter(mine) if info is None else mine[info.id :: info.num_workers]


@pytest.mark.parametrize("right", [by_global_number])
def test_other_ways_to_share_shards_pass(right):
    passes("02.4", right)


@pytest.mark.parametrize(
    ("seed_of", "said"),
    [
        (lambda seed, epoch, rank, worker: seed + epoch + rank + worker, "rank 1 draws the numbers of worker 1 of"),
        (lambda seed, epoch, rank, worker: [seed, rank, epoch + worker], "draws in epoch 1 what worker 1 draws in"),
    ],
)
def test_a_sum_with_the_worker_in_it_is_named(seed_of, said):
    def rank_loader(dataset, batch_size, rank, world_size, epoch, seed):
        def init(worker):
            get_worker_info().dataset.rng = np.random.default_rng(seed_of(seed, epoch, rank, worker))

        sampler = DistributedSampler(dataset, world_size, rank, seed=seed)
        sampler.set_epoch(epoch)
        return DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=init)

    text = examine("02.1", rank_loader).text
    assert said in text and "a sum such as" in text, text
