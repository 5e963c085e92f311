"""Exercises of notebook 03: right answers of another style pass, and one wrong answer that no known mistake covers."""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def shard_in_blocks(dataset_size, rank, world_size, epoch, seed):
    order = torch.randperm(dataset_size, generator=torch.Generator().manual_seed(1000 * seed + epoch)).tolist()
    each = -(-dataset_size // world_size)
    order = (order * world_size)[: each * world_size]
    return order[rank * each : (rank + 1) * each]


def shard_by_torch(dataset_size, rank, world_size, epoch, seed):
    sampler = DistributedSampler(range(dataset_size), world_size, rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_another_partition_is_as_good():
    passes("03.1", shard_in_blocks)
    passes("03.1", shard_by_torch)


def accumulate_by_hand(ddp, optimizer, micro_batches, loss_fn):
    """All passes without DDP's exchange, then one all-reduce of all gradients and the number of rows."""
    optimizer.zero_grad()
    rows = 0
    for x, y in micro_batches:
        with ddp.no_sync():
            (loss_fn(ddp(x), y) * len(x)).backward()
        rows += len(x)
    flat = torch.cat([p.grad.flatten() for p in ddp.parameters()] + [torch.tensor([float(rows)])]).double()
    dist.all_reduce(flat)
    flat, at = flat[:-1] / flat[-1], 0
    for p in ddp.parameters():
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()
    optimizer.step()


def accumulate_shares(ddp, optimizer, micro_batches, loss_fn):
    """DDP's exchange, with shares of rows that are known before the loop."""
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(len(y) for _, y in micro_batches))
    weight = len(counts) / sum(counts)
    optimizer.zero_grad(set_to_none=False)
    *first, (x, y) = micro_batches
    with ddp.no_sync():
        for a, b in first:
            loss_fn(ddp(a), b).mul(weight * len(a)).backward()
    loss_fn(ddp(x), y).mul(weight * len(x)).backward()
    optimizer.step()


def test_two_ways_to_exchange_once():
    passes("03.3", accumulate_by_hand)
    passes("03.3", accumulate_shares)


def test_no_exchange_at_all_is_shown_as_a_number():
    def never(ddp, optimizer, micro_batches, loss_fn):
        optimizer.zero_grad()
        with ddp.no_sync():
            for x, y in micro_batches:
                loss_fn(ddp(x), y).backward()
        optimizer.step()

    assert "gradients cross the network: expected 1, got 0" in examine("03.3", never).text


def train_with_subsets(model, train_set, test_set, epochs, path):
    dist.init_process_group("gloo", init_method="env://")
    rank, n = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set, num_replicas=n, rank=rank, shuffle=True, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train_set, 8, sampler=sampler):
            loss = cross_entropy(ddp(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    if not rank:
        torch.save(ddp.module.state_dict(), path)
    right = torch.zeros((), dtype=torch.long)
    for x, y in DataLoader(Subset(test_set, range(rank, len(test_set), n)), 2):
        right += (model(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    dist.destroy_process_group()
    return float(right) / len(test_set)


def train_tested_by_all(model, train_set, test_set, epochs, path):
    """Every rank tests everything: slower, and right."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train_set, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    right = [int(model(x).argmax() == y) for x, y in (test_set[i] for i in range(len(test_set)))]
    dist.destroy_process_group()
    return sum(right) / len(right)


def test_two_other_programs():
    passes("03.4", train_with_subsets)
    passes("03.4", train_tested_by_all)
