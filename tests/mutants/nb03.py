"""Typical mistakes in notebook 03: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def _order(size, seed):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def _deal(order, rank, world_size):
    total = -(-len(order) // world_size) * world_size
    return (order + order[: total - len(order)])[rank::world_size]


def _same_on_every_rank(dataset_size, rank, world_size, epoch, seed):
    return _order(dataset_size, seed + epoch)[: -(-dataset_size // world_size)]


def _contiguous_in_order(dataset_size, rank, world_size, epoch, seed):
    n = -(-dataset_size // world_size)
    return (list(range(dataset_size)) * 2)[rank * n : (rank + 1) * n]


def _every_nth_in_order(dataset_size, rank, world_size, epoch, seed):
    return list(range(rank, dataset_size, world_size))


def _epoch_forgotten(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, seed), rank, world_size)


def _rank_in_the_seed(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, seed + 1000 * epoch + rank), rank, world_size)


def _remainder_dropped(dataset_size, rank, world_size, epoch, seed):
    n = max(1, dataset_size // world_size)
    return _order(dataset_size, seed + epoch)[rank * n : (rank + 1) * n] or [0]


def _unequal_lengths(dataset_size, rank, world_size, epoch, seed):
    return _order(dataset_size, seed + epoch)[rank::world_size]


def _global_seed(dataset_size, rank, world_size, epoch, seed):
    torch.manual_seed(seed + epoch)
    return _deal(torch.randperm(dataset_size).tolist(), rank, world_size)


def _cut_then_shuffled(dataset_size, rank, world_size, epoch, seed):
    own = _contiguous_in_order(dataset_size, rank, world_size, epoch, seed)
    return [own[i] for i in _order(len(own), seed + epoch)]


def _weights(micro_batches):
    """Of each micro-batch, as in the reference."""
    rows = torch.tensor(sum(len(x) for x, _ in micro_batches))
    dist.all_reduce(rows)
    return [len(x) * dist.get_world_size() / rows.item() for x, _ in micro_batches]


def _accumulate(weights=_weights, forward_outside=False, step_inside=False, zero_inside=False, syncs=None):
    """`accumulate_step` with a mistake; `syncs(i, last)` says which micro-batches are outside of no_sync."""
    syncs = syncs or (lambda i, last: last)

    def accumulate_step(ddp, optimizer, micro_batches, loss_fn):
        shares = weights(micro_batches)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(micro_batches):
            if zero_inside:
                optimizer.zero_grad()
            loss = loss_fn(ddp(x), y) * shares[i] if forward_outside else None
            with nullcontext() if syncs(i, i == len(micro_batches) - 1) else ddp.no_sync():
                (loss_fn(ddp(x), y) * shares[i] if loss is None else loss).backward()
            if step_inside:
                optimizer.step()
        if not step_inside:
            optimizer.step()

    return accumulate_step


def _own_rows(micro_batches):
    return [len(x) / sum(len(x) for x, _ in micro_batches) for x, _ in micro_batches]


def _world_size_forgotten(micro_batches):
    return [w / dist.get_world_size() for w in _weights(micro_batches)]


def _one_backward(ddp, optimizer, micro_batches, loss_fn):
    shares = _weights(micro_batches)
    optimizer.zero_grad()
    with ddp.no_sync():
        early = sum(loss_fn(ddp(x), y) * w for (x, y), w in zip(micro_batches[:-1], shares, strict=False))
    x, y = micro_batches[-1]
    (early + loss_fn(ddp(x), y) * shares[-1]).backward()
    optimizer.step()


def _program(
    init=True,
    sampled=True,
    set_epoch=True,
    through_ddp=True,
    savers=(0,),
    wrapped=False,
    waits=True,
    accuracy="sums",
    ends=True,
):
    """The program of 03.4 with one of its faults left in it."""

    def train(model, train_set, test_set, epochs, path):
        if init:
            dist.init_process_group("gloo")
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        ddp = DistributedDataParallel(model)
        sampler = DistributedSampler(train_set)
        loader = DataLoader(train_set, batch_size=8, sampler=sampler if sampled else None, shuffle=not sampled)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epoch in range(epochs):
            if set_epoch:
                sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy((ddp if through_ddp else model)(x), y).backward()
                optimizer.step()
        if rank in savers:
            torch.save((ddp if wrapped else model).state_dict(), path)
        if waits:
            dist.barrier()
        model.load_state_dict(torch.load(path, weights_only=True))
        mine = [test_set[i] for i in range(rank, len(test_set), ranks)]
        counts = torch.tensor([float(sum(int(model(x).argmax() == y) for x, y in mine)), len(mine)])
        if accuracy == "means":
            counts = torch.stack([counts[0] / counts[1], torch.tensor(1.0)])
        if accuracy != "own":
            dist.all_reduce(counts)
        if ends:
            dist.destroy_process_group()
        return (counts[0] / counts[1]).item()

    return train


MUTANTS = {
    "03.1": {
        "same on every rank": (_same_on_every_rank, "ranks 0 and 1 both got ["),
        "every n-th, in order": (_every_nth_in_order, "rank 0 got [0, 3, 6, 9]"),
        "epoch forgotten": (_epoch_forgotten, "set_epoch"),
        "rank in the seed": (_rank_in_the_seed, "never on rank"),
        "remainder dropped": (_remainder_dropped, "goes to no rank"),
        "unequal lengths": (_unequal_lengths, "the ranks got [3, 3, 2, 2]"),
        "global generator seeded": (_global_seed, "global random generator"),
        "cut, then shuffled": (_cut_then_shuffled, "the same 30 samples in every epoch"),
    },
    "03.3": {
        "each rank for itself": (_accumulate(_own_rows), "rank 0 has 12 rows and rank 1 has 4"),
        "world size forgotten": (_accumulate(_world_size_forgotten), "half as large as it should be"),
        "mean of means": (
            _accumulate(lambda batches: [1 / len(batches)] * len(batches)),
            "every micro-batch weighs the same",
        ),
        "forward outside no_sync": (_accumulate(forward_outside=True), "DDP decides in the forward pass"),
        "last one inside no_sync": (
            _accumulate(syncs=lambda i, last: False),
            "the parameters of the two ranks now differ",
        ),
        "zero_grad inside": (_accumulate(zero_inside=True), "only the last micro-batch is in the gradient"),
        "step inside": (_accumulate(step_inside=True), "made 3 optimizer steps, not 1"),
        "one backward for all": (_one_backward, "their activations are in memory at once"),
    },
    "03.4": {
        "no process group": (_program(init=False), "a process group that nobody has made"),
        "no sampler": (_program(sampled=False), "each rank reads all 32 samples"),
        "no set_epoch": (_program(set_epoch=False), "every epoch has the same order"),
        "around DDP": (_program(through_ddp=False), "nobody exchanged gradients"),
        "every rank saves": (_program(savers=(0, 1)), "ranks 0, 1 wrote the same file"),
        "no barrier": (_program(waits=False), "before it is there"),
        "own accuracy": (_program(accuracy="own"), "each one its own share's accuracy"),
        "no end": (_program(ends=False), "still exists when the program ends"),
    },
}
