"""Checker of exercise 08.2: right entry points of other styles pass, and every mistake has its name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mutants.nb08_elastic import MUTANTS, RARER

from labs.chapters.nb08 import exercise_elastic
from labs.chapters.nb08.exercise_elastic import BATCH, EPOCHS, PER_EPOCH, SAMPLES, batch_of, check_survive, order_of
from labs.chapters.nb08.solution_elastic import survive
from labs.kit.check import Mistake

WRONG = MUTANTS["08.2"] | RARER


def in_blocks(job):
    """The newest of what any rank sees, by all_gather_object; batches split in blocks; the notice by gathering."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [None] * ranks
    dist.all_gather_object(every, job.newest())
    step, state = max((found for found in every if found), key=lambda found: found[0], default=(0, None))
    if state is not None:
        job.load_state(state)
    for epoch in range(step // job.steps_per_epoch, job.epochs):
        order = job.order(epoch)
        batches = [order[k : k + job.batch] for k in range(0, len(order), job.batch)]
        for batch in batches[step - epoch * job.steps_per_epoch :]:
            size = len(batch) // ranks
            job.train(batch[rank * size : (rank + 1) * size])
            step += 1
            notices = [None] * ranks
            dist.all_gather_object(notices, job.stopping())
            last = step == job.epochs * job.steps_per_epoch
            if rank == 0 and (step % job.save_every == 0 or last or any(notices)):
                job.save(step, job.state())
            if any(notices):
                return


def with_tensors(job):
    """The step is broadcast as a tensor, and rank 0's state tensor by tensor; barriers where none is needed."""
    found = job.newest() if dist.get_rank() == 0 else None
    step = torch.tensor(found[0] if found else 0)
    dist.broadcast(step, 0)
    state = found[1] if found else job.state()
    for name in sorted(state):
        dist.broadcast(state[name], 0)
    job.load_state(state)
    numbers = [n for epoch in range(job.epochs) for n in job.order(epoch)]
    for first in range(int(step) * job.batch, len(numbers), job.batch):
        job.train(numbers[first + dist.get_rank() : first + job.batch : dist.get_world_size()])
        step += 1
        stop = torch.tensor(int(job.stopping()))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        due = int(step) % job.save_every == 0 or first + job.batch == len(numbers) or stop
        if due and dist.get_rank() == 0:
            job.save(int(step), job.state())
        dist.barrier()
        if stop:
            break


@pytest.mark.parametrize(
    "right", [survive, *(pytest.param(r, marks=pytest.mark.long) for r in (in_blocks, with_tensors))]
)
def test_right_entry_points_of_any_style_pass(right):
    check_survive(right)


@pytest.mark.drill
@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_has_its_name(name):
    wrong, words = WRONG[name]
    with pytest.raises(Mistake) as found:
        check_survive(wrong)
    assert words in str(found.value)


def test_one_mistake_is_told_by_a_job_that_was_really_killed(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(
        exercise_elastic,
        "_killed",
        lambda f, folder, real=exercise_elastic._killed: (killed.append(real(f, folder)), killed[-1])[1],
    )
    with pytest.raises(Mistake, match="the epoch begins again"):
        check_survive(WRONG["the epoch begins again"][0])
    assert killed == [8], "killed before its tenth step, saved every fourth"


def test_batches_of_the_whole_training_hold_each_sample_once_an_epoch():
    for epoch in range(EPOCHS):
        every = [n for k in range(PER_EPOCH) for n in batch_of(epoch * PER_EPOCH + k)]
        assert sorted(every) == list(range(SAMPLES)) and len(batch_of(epoch)) == BATCH
    assert order_of(0) != order_of(1)
