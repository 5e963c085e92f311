"""Reference solutions of notebook 02."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


def rank_loader(dataset: Dataset, batch_size: int, rank: int, world_size: int, epoch: int, seed: int) -> DataLoader:
    """The part of `rank` in `epoch`: another order and other draws than all others, the same when run again."""

    def seed_worker(worker_id: int) -> None:
        get_worker_info().dataset.rng = np.random.default_rng([seed, epoch, rank, worker_id])

    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)
    sampler.set_epoch(epoch)  # or every epoch has the order of epoch 0
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)


def my_shards(shards: Sequence[str], rank: int, world_size: int) -> Sequence[str]:
    """The shards of this process: every world_size-th for the rank, of these every num_workers-th for the worker."""
    of_this_rank = shards[rank::world_size]
    worker = get_worker_info()
    if worker is None:  # num_workers=0: the main process reads all that its rank has to read
        return of_this_rank
    return of_this_rank[worker.id :: worker.num_workers]
