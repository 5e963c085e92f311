"""Answers that are right in an unusual way pass."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mutants import nb01, nb03
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from labs.chapters.nb00 import solutions as solutions_00
from labs.kit.check import examine


def passes(exercise_id, right):
    outcome = examine(exercise_id, right)
    assert outcome.state == "passed", outcome.text


def gpu_cores_too(report):
    """Right: more ranks than cores take turns on any device."""
    return "cores" if report["ranks"] > report["usable cores"] else solutions_00.diagnose(report)


def test_cores_are_counted_on_any_device():
    passes("00.1", gpu_cores_too)


@pytest.mark.parametrize("no_quota", [lambda text: "max" in text, lambda text: text.split()[0] == "max"])
def test_any_way_to_see_that_there_is_no_quota_passes(no_quota):
    def usable_cores(affinity, cpu_max):
        if no_quota(cpu_max):
            return len(affinity)
        quota, period = map(int, cpu_max.split())
        return max(1, min(len(affinity), quota // period))

    passes("00.2", usable_cores)


def of_samples(statistic, n, warm_up):
    """What `statistic` makes of the seconds of `n` steps."""
    return lambda *device: statistic(nb01._samples(*device, n=n, warm_up=warm_up))


@pytest.mark.parametrize(("warm_up", "n"), [(10, 20), (11, 21), (15, 33)])
def test_twenty_samples_are_enough(warm_up, n):
    passes("01.1", of_samples(statistics.median, n, warm_up))
    passes("01.1", of_samples(lambda s: statistics.median_high(s[warm_up:]), n + warm_up, 0))


def to(tensor, device):
    return tensor.to(device, non_blocking=True)


def epoch(x_to=to, y_to=to):
    def train_epoch(model, optimizer, loss_of, batches, device):
        total, right = torch.zeros((), device=device), torch.zeros((), device=device)
        for x, y in batches:
            x, y = x_to(x, device), y_to(y, device)
            optimizer.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(y)
            right += (output.argmax(1) == y).sum()
        n = sum(len(y) for _, y in batches)
        torch.cuda.synchronize()
        return total.item() / n, right.item() / n

    return train_epoch


@pytest.mark.parametrize(
    "right",
    [
        epoch(x_to=lambda x, device: x.to(str(device), non_blocking=True)),
        epoch(x_to=lambda x, device: x.pin_memory().to(device, non_blocking=True)),  # they lie there already
        epoch(y_to=lambda y, device: y.to(torch.empty((), dtype=y.dtype, device=device), non_blocking=True)),
    ],
)
def test_unusual_epochs_pass(right):
    passes("01.3", right)


def shard(begin=lambda rank, ranks: rank, of=list):
    """Right, whose turn it is first and whatever `of` makes of a rank's part."""

    def shard(dataset_size, rank, world_size, epoch, seed):
        order = nb03._order(dataset_size, 100 * seed + epoch)
        total = -(-dataset_size // world_size) * world_size
        return of((order * total)[:total][begin(rank, world_size) :: world_size])

    return shard


@pytest.mark.parametrize(
    "right",
    [
        shard(begin=lambda rank, ranks: ranks - 1 - rank),
        shard(begin=lambda rank, ranks: (rank + 1) % ranks),
        shard(of=torch.tensor),
        shard(of=np.array),
    ],
)
def test_unusual_samplers_pass(right):
    passes("03.1", right)


def test_an_accuracy_as_a_tensor_passes():
    def train(model, train_set, test_set, epochs, path):
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ddp, sampler = DistributedDataParallel(model), DistributedSampler(train_set)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(train_set, batch_size=8, sampler=sampler):
                optimizer.zero_grad()
                cross_entropy(ddp(x), y).backward()
                optimizer.step()
        if rank == 0:
            torch.save(model.state_dict(), path)
        mine = [test_set[i] for i in range(rank, len(test_set), ranks)]
        counts = torch.tensor([sum(int(model(x).argmax() == y) for x, y in mine), len(mine)])
        dist.all_reduce(counts)
        dist.destroy_process_group()
        return counts[0] / counts[1]

    passes("03.4", train)


def test_a_loss_in_double_precision_passes():
    def chunked_loss(hidden, weight, wanted, chunk_tokens):
        def one(h, y):
            return cross_entropy(h.double() @ weight.T.double(), y, reduction="sum")

        pairs = zip(torch.split(hidden, chunk_tokens), torch.split(wanted, chunk_tokens), strict=True)
        return sum(checkpoint(one, h, y, use_reentrant=False) for h, y in pairs) / (wanted != -100).sum()

    passes("05.3", chunked_loss)
