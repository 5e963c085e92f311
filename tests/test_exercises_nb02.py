"""Exercises of notebook 02: right answers of another style pass; the shared tests judge references and mistakes."""

import functools

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info

from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


class Init:
    def __init__(self, *numbers):
        self.numbers = numbers

    def __call__(self, worker):
        get_worker_info().dataset.rng = np.random.default_rng((*self.numbers, worker))


class Part(Sampler):
    def __init__(self, size, rank, world_size, epoch, seed):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(1000 * seed + epoch))
        self.order = order[rank::world_size].tolist()

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def loader_with_a_callable_object(dataset, batch_size, rank, world_size, epoch, seed):
    sampler = Part(len(dataset), rank, world_size, epoch, seed)
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=Init(seed, epoch, rank), drop_last=True,
        generator=torch.Generator().manual_seed(hash((seed, epoch, rank)) % 2**32),
    )  # fmt: skip


def reseed(worker):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def loader_with_a_seeded_generator(dataset, batch_size, rank, world_size, epoch, seed):
    """torch derives each worker's seed from the loader's generator."""
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * epoch + rank)
    sampler = Part(len(dataset), rank, world_size, epoch, seed)
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=2, worker_init_fn=reseed, generator=generator,
        multiprocessing_context="fork",
    )  # fmt: skip


def test_two_other_loaders():
    passes("02.1", loader_with_a_callable_object)
    passes("02.1", loader_with_a_seeded_generator)


def test_workers_seeded_by_the_global_state_are_found():
    def answer(*args):
        loader = loader_with_a_callable_object(*args)
        loader.generator = None
        return loader

    assert "draw from torch" in examine("02.1", answer).text


def test_a_closure_of_another_kind_is_the_same_mistake():
    def answer(dataset, batch_size, rank, world_size, epoch, seed):
        def init(worker):
            reseed(worker)

        loader = loader_with_a_callable_object(dataset, batch_size, rank, world_size, epoch, seed)
        loader.worker_init_fn = functools.partial(init)
        return loader

    assert "can't be pickled" in examine("02.1", answer).text


def limits_by_ratio(run):
    _, model, loader, both, *_ = run.values()
    if not run["num_workers"]:
        return "turns"
    slower = {"model": model, "loader": loader}
    side = min(slower, key=slower.get)
    return side if both / slower[side] > 0.85 else "cores"


def limits_by_the_step(run):
    if run["num_workers"] == 0:
        return "turns"
    if run["step together (ms)"] > 1.2 * run["step alone (ms)"]:
        return "cores"
    return "loader" if run["loader alone (images/s)"] < run["model alone (images/s)"] else "model"


def test_two_other_diagnoses():
    passes("02.3", limits_by_ratio)
    passes("02.3", limits_by_the_step)


def shards_in_blocks(shards, rank, world_size):
    each = len(shards) // world_size
    mine, info = shards[rank * each : (rank + 1) * each], get_worker_info()
    if info is None:
        return mine
    return [name for k, name in enumerate(mine) if k % info.num_workers == info.id]


def shards_as_generator(shards, rank, world_size):
    info = get_worker_info()
    workers, me = (info.num_workers, info.id) if info else (1, 0)
    usable = len(shards) - len(shards) % world_size
    for k, name in enumerate(shards[:usable]):
        if k % world_size == rank and k // world_size % workers == me:
            yield name


def test_two_other_ways_to_share_shards():
    passes("02.4", shards_in_blocks)
    passes("02.4", shards_as_generator)
