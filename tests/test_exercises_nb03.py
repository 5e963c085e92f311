"""Checkers of notebook 03: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mutants import nb03 as mutants

from labs.chapters.nb03 import solutions as solution
from labs.kit.check import examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


# -- 03.1


def shard_by(fill, cut=lambda order, rank, ranks: order[rank::ranks]):
    """Right but for what `fill(order, missing)` puts at the end of the order."""

    def shard(dataset_size, rank, world_size, epoch, seed):
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(dataset_size, generator=generator).tolist()
        return cut(order + fill(order, -dataset_size % world_size), rank, world_size)

    return shard


def in_blocks(order, rank, ranks):
    each = len(order) // ranks
    return order[rank * each : (rank + 1) * each]


@pytest.mark.parametrize(
    "right", [shard_by(lambda order, n: (order * n)[:n]), shard_by(lambda order, n: (order * n)[:n], in_blocks)]
)
def test_dealt_or_in_blocks_is_as_good(right):
    passes("03.1", right)


@pytest.mark.parametrize("cut", [in_blocks, lambda order, rank, ranks: order[rank::ranks]])
def test_two_samples_on_seven_ranks_need_more_than_one_turn(cut):
    text = examine("03.1", shard_by(lambda order, n: order[:n], cut)).text
    assert "2 samples on 7 ranks: the ranks got [" in text, text


@pytest.mark.parametrize(
    ("size", "ranks"),
    [
        (1, 3),
        (2, 7),
        (0, 2),
    ],
)
def test_the_reference_gives_each_rank_as_many(size, ranks):
    assert {len(solution.shard(size, rank, ranks, 0, 0)) for rank in range(ranks)} == {-(-size // ranks)}


@pytest.mark.parametrize(
    "fill", [lambda order, n: [0] * n, lambda order, n: order[-1:] * n, lambda order, n: order[len(order) - n :]]
)
def test_what_fills_up_must_come_from_the_beginning(fill):
    assert "is not its own beginning" in examine("03.1", shard_by(fill)).text


# -- 03.3


def step_by_hand(ddp, optimizer, micro_batches, loss_fn, sends):
    """Everything under no_sync, then the mean over all rows by `sends(gradients)`, which adds up over ranks."""
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, sum(len(x) for x, _ in micro_batches))
    optimizer.zero_grad()
    for x, y in micro_batches:
        with ddp.no_sync():
            (loss_fn(ddp(x), y) * len(x) / sum(rows)).backward()
    sends([p.grad for p in ddp.parameters()])
    optimizer.step()


def flat(gradients):
    total = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(total)
    for g, summed in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        g.copy_(summed.view_as(g))


def one_by_one(gradients):
    for g in gradients:
        dist.all_reduce(g)


@pytest.mark.parametrize("sends", [flat, one_by_one])
def test_a_gradient_sent_once_by_hand_passes(sends):
    passes(
        "03.3",
        lambda ddp, optimizer, micro_batches, loss_fn: step_by_hand(ddp, optimizer, micro_batches, loss_fn, sends),
    )


def test_a_gradient_sent_by_hand_for_each_micro_batch_is_told():
    def accumulate_step(ddp, optimizer, micro_batches, loss_fn):
        step_by_hand(
            ddp, optimizer, micro_batches, loss_fn, lambda gradients: [flat(gradients), flat(zeros(gradients))]
        )

    def zeros(gradients):
        return [torch.zeros_like(g) for g in gradients]

    assert "by hand" in examine("03.3", accumulate_step).text


def test_a_step_on_rank_0_alone_is_told():
    def accumulate_step(ddp, optimizer, micro_batches, loss_fn):
        stepped = optimizer.step
        optimizer.step = lambda: stepped() if dist.get_rank() == 0 else None
        solution.accumulate_step(ddp, optimizer, micro_batches, loss_fn)

    assert "rank 1 made no optimizer step" in examine("03.3", accumulate_step).text


@pytest.mark.long
def test_a_rank_that_synchronises_alone_is_told():
    alone = mutants._accumulate(syncs=lambda i, last: last and dist.get_rank() == 0)
    assert "wait for each other for ever" in examine("03.3", alone).text


# -- 03.4


def without_ddp(model, train_set, test_set, epochs, path):
    """Right, and all by hand: the sampler, the mean of the gradients, the counts."""
    dist.init_process_group(backend="gloo", init_method="env://")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(epoch)).tolist()[rank::ranks]
        for x, y in torch.utils.data.DataLoader(torch.utils.data.Subset(train_set, order), batch_size=8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.monitored_barrier()
    model.load_state_dict(torch.load(path, weights_only=True))
    mine = [test_set[i] for i in range(rank, len(test_set), ranks)]
    found = [None] * ranks
    dist.all_gather_object(found, [bool(model(x).argmax() == y) for x, y in mine])
    dist.destroy_process_group()
    return sum(map(sum, found)) / sum(map(len, found))


@pytest.mark.parametrize("right", [without_ddp, mutants._program()])
def test_other_programs_pass(right):
    passes("03.4", right)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"wrapped": True}, "DDP's wrapper puts module. before each"),
        ({"accuracy": "means"}, "the mean of the ranks' accuracies"),
        ({"savers": ()}, "before it is there"),
    ],
)
def test_rarer_faults_of_the_program_are_told(fault, words):
    assert words in examine("03.4", mutants._program(**fault)).text
