"""Checkers of notebook 02: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from speeds import first
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, get_worker_info

from labs.chapters.nb02 import solutions as solution
from labs.kit.check import examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


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
