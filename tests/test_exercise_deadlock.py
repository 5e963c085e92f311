"""Exercise 10.1: right loops of other styles pass, every mistake has its name, the given loop hangs as it is said."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist
from mutants.nb10_deadlock import MUTANTS, RARER, way
from speeds import first
from torch.nn.parallel import DistributedDataParallel

from labs.chapters.nb10 import given_loop
from labs.chapters.nb10.exercise_deadlock import SLIPS, SPLITS, Split, _body, _check_split, _read, check_train, trained
from labs.chapters.nb10.given_loop import validate
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake, examine


def with_ddp(job):
    """DDP, which averages over ranks, so the loss is scaled; a rank that has run out computes a batch of 0 samples."""
    ddp, ranks = DistributedDataParallel(job.model), dist.get_world_size()
    for epoch in range(job.epochs):
        batches = list(job.batches(epoch))
        most, seen = torch.tensor([len(batches)]), torch.zeros(2)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        nothing = torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        for x, y in batches + [nothing] * (int(most) - len(batches)):
            count = torch.tensor(len(y))
            dist.all_reduce(count)
            loss = job.loss(ddp(x), y)
            job.optimizer.zero_grad()
            (loss * ranks / count).backward()
            job.optimizer.step()
            seen += torch.tensor([loss.item(), len(y)])
        dist.reduce(seen, 0)
        valid = validate(job)
        if not dist.get_rank():
            job.log(epoch, seen[0] / seen[1], valid)


def with_objects(job):
    """Everybody's gradients as objects, None from who has run out; one more exchange of Nones ends the epoch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = list(job.model.parameters())

    def gathered(value):
        every = [None] * ranks
        dist.all_gather_object(every, value)
        return [v for v in every if v is not None]

    for epoch in range(job.epochs):
        batches, rows = job.batches(epoch), []
        while True:
            mine = None
            for x, y in batches:
                loss = job.loss(job.model(x), y)
                mine = (len(y), loss.item(), torch.autograd.grad(loss, parameters))
                break
            if not (every := gathered(mine)):
                break
            rows += every
            for i, p in enumerate(parameters):
                p.grad = sum(g[i] for _, _, g in every) / sum(n for n, _, _ in every)
            job.optimizer.step()
        with torch.no_grad():
            own = [(job.loss(job.model(x), y).item(), len(y)) for x, y in job.validation()]
        tested = [pair for part in gathered(own) for pair in part]
        if rank == 0:
            job.log(
                epoch,
                sum(v for _, v, _ in rows) / sum(n for n, _, _ in rows),
                sum(v for v, _ in tested) / sum(n for _, n in tested),
            )


@pytest.mark.parametrize("right", first(1, [with_ddp, with_objects, way()]))
def test_right_loops_of_any_style_pass(right):
    check_train(right)


@pytest.mark.drill
@pytest.mark.parametrize("name", first(3, RARER))
def test_rarer_mistakes_have_their_name(name):
    wrong, words = RARER[name]
    with pytest.raises(Mistake) as found:
        check_train(wrong)
    assert words in str(found.value)


def test_a_hang_names_where_each_rank_is():
    with pytest.raises(Mistake) as found:
        check_train(MUTANTS["10.1"]["the data still ends earlier"][0])
    assert "with 13 and 22 samples" in str(found.value)
    assert "rank 0 is in all_reduce after 4 steps" in str(found.value)
    assert "rank 1 is in all_reduce after 4 steps" in str(found.value)
    assert "average_gradients(job.model, len(x))" in str(found.value)


def test_the_given_loop_works_on_one_rank(tmp_path):
    split = Split((13,), (6,))
    [[weights]] = on_ranks(_body, 1, given_loop.train, [split], str(tmp_path), when="")
    _check_split(given_loop.train, split, [_read(tmp_path, 0, 0)], [weights])


def test_every_slip_gives_other_weights_than_the_reference_on_some_split():
    splits = [s for several in SPLITS.values() for s in several]
    for wrong in SLIPS:
        assert any(trained(s, wrong).weights != pytest.approx(trained(s).weights, rel=1e-6) for s in splits), wrong


def test_leaving_the_process_is_told():
    for leave in (lambda job: os._exit(3), lambda job: sys.exit()):
        outcome = examine("10.1", leave)
        assert outcome.state == "not yet", outcome.text
