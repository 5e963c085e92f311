"""Typical mistakes in notebook 02: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info


def _renew(worker_id):
    get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def _loader(dataset, batch_size, rank, world_size, epoch, seed, *, set_epoch=True, shuffle=True, **options):
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed)
    if set_epoch:
        sampler.set_epoch(epoch)
    own = torch.Generator().manual_seed(1000 * (1000 * seed + epoch) + rank)
    options = {"worker_init_fn": _renew, "generator": own, "num_workers": 2} | options
    return DataLoader(dataset, batch_size, sampler=sampler, **options)


def _with(**options):
    return lambda *args: _loader(*args, **options)


def _no_sampler(dataset, batch_size, rank, world_size, epoch, seed):
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=2, worker_init_fn=_renew)


def _always_rank_0(dataset, batch_size, rank, world_size, epoch, seed):
    return _loader(dataset, batch_size, 0, world_size, epoch, seed)


def _seeded_with(choose):
    def loader(dataset, batch_size, rank, world_size, epoch, seed):
        own = torch.Generator().manual_seed(choose(rank, epoch, seed))
        return _loader(dataset, batch_size, rank, world_size, epoch, seed, generator=own)

    return loader


def _worker():
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _everything(shards, rank, world_size):
    return shards


def _by_worker_only(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[worker_id::num_workers]


def _none_not_expected(shards, rank, world_size):
    info = get_worker_info()
    return shards[rank::world_size][info.id :: info.num_workers]


def _alone_in_the_job(shards, rank, world_size):
    info = get_worker_info()
    return shards if info is None else shards[rank::world_size][info.id :: info.num_workers]


def _blocks_without_the_rest(shards, rank, world_size):
    worker_id, num_workers = _worker()
    size = len(shards) // (world_size * num_workers)
    k = rank * num_workers + worker_id
    return shards[k * size : (k + 1) * size]


def _rest_to_the_last(shards, rank, world_size):
    worker_id, num_workers = _worker()
    n, k = world_size * num_workers, rank * num_workers + worker_id
    size = len(shards) // n
    return shards[k * size :] if k == n - 1 else shards[k * size : (k + 1) * size]


def _factors_swapped(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return shards[worker_id * num_workers + rank :: world_size * num_workers]


def _shuffled_by_each(shards, rank, world_size):
    worker_id, num_workers = _worker()
    return random.sample(shards, len(shards))[rank::world_size][worker_id::num_workers]


MUTANTS = {
    "02.1": {
        "no sampler": (_no_sampler, "each rank reads all 24 items"),
        "always rank 0": (_always_rank_0, "both ranks read the same items"),
        "no set_epoch": (_with(set_epoch=False), "both epochs have the same order"),
        "not shuffled": (_with(shuffle=False), "in the order of their numbers"),
        "no worker_init_fn": (_with(worker_init_fn=None), "both workers draw the same"),
        "no generator": (_with(generator=None), "rank 1 draws the numbers of rank 0"),
        "seeded with the rank alone": (_seeded_with(lambda rank, epoch, seed: rank), "epoch 1 draws the numbers of"),
        "the clock": (_seeded_with(lambda *_: time.time_ns()), "a second run with the same seed draws other"),
    },
    "02.4": {
        "everything": (_everything, "all 6 processes"),
        "by worker only": (_by_worker_only, "the ranks read the same"),
        "None not expected": (_none_not_expected, "get_worker_info() returns None"),
        "alone in the job": (_alone_in_the_job, "alone on its rank, not in the job"),
        "blocks without the rest": (_blocks_without_the_rest, "nobody reads tiles-06"),
        "rest to the last": (_rest_to_the_last, "1, 1 and 5"),
        "factors swapped": (_factors_swapped, "both read"),
        "shuffled by each": (_shuffled_by_each, "asked twice"),
    },
}
