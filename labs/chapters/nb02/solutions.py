"""Reference solutions of notebook 02."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from labs.kit.measure import differs, paired_ratio


def rank_loader(dataset: Dataset, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    """The part of `rank` in `epoch`: another order and other draws than all others, the same when run again."""

    def seed_worker(worker_id: int) -> None:
        get_worker_info().dataset.rng = np.random.default_rng([seed, epoch, rank, worker_id])

    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)  # or every epoch has the order of epoch 0
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)


def limit(model_s: Sequence[float], loader_s: Sequence[float]) -> tuple[str, float]:
    """Which of the two is the slower, as far as the samples show it, and the seconds per step of both together."""
    expected_s = max(statistics.median(model_s), statistics.median(loader_s))
    ratio = paired_ratio(loader_s, model_s)
    if not differs(ratio):
        return "neither", expected_s
    return "loader" if ratio.value > 1 else "model", expected_s


def cheapest(rates: Mapping[Any, Sequence[float]], tolerance: float) -> Any:
    """The first setting whose samples do not show that it loses more than `tolerance` against the best."""
    best = max(rates, key=lambda setting: statistics.median(rates[setting]))
    for setting, samples_per_s in rates.items():
        if paired_ratio(samples_per_s, rates[best]).high >= 1 - tolerance:
            return setting
    return best


def my_shards(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    """The shards of this process: every world_size-th for the rank, of these every num_workers-th for the worker."""
    of_this_rank = shards[rank::world_size]
    worker = get_worker_info()
    if worker is None:  # num_workers=0: the main process reads all that its rank has to read
        return of_this_rank
    return of_this_rank[worker.id :: worker.num_workers]
