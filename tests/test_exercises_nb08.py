"""Exercises of notebook 08: right answers of another style pass, and wrong ones that no known mistake covers."""

import pytest
import torch.distributed as dist

from labs.exercises import nb08
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def fails(exercise_id, answer, *words):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "not yet" and all(word in outcome.text for word in words), outcome.text


def in_tensors(x, inside, across, inside_b_s, across_b_s):
    """The same with one tensor in and out, and a list of phases."""
    k, n = dist.get_world_size(inside), dist.get_world_size(across)
    part = x.new_empty(x.numel() // k)
    dist.reduce_scatter_tensor(part, x, group=inside)
    dist.all_reduce(part, group=across)
    dist.all_gather_into_tensor(x, part, group=inside)
    once = (k - 1) / k * x.numel() * 4 / inside_b_s
    return sum([once, 2 * x.numel() * 4 * (1 - 1 / n) / across_b_s, once])


def by_reduces(x, inside, across, inside_b_s, across_b_s):
    """Each part is reduced to its rank, and broadcast from it at the end."""
    node = dist.get_process_group_ranks(inside)
    parts = x.chunk(len(node))
    for rank, part in zip(node, parts, strict=True):
        dist.reduce(part, rank, group=inside)
    dist.all_reduce(parts[node.index(dist.get_rank())], group=across)
    for rank, part in zip(node, parts, strict=True):
        dist.broadcast(part, rank, group=inside)
    k, n = inside.size(), across.size()
    return 2 * x.nbytes * ((1 - 1 / k) / inside_b_s + (1 - 1 / n) / across_b_s)


def test_an_all_reduce_over_two_levels():
    passes("08.1", in_tensors)


@pytest.mark.long
def test_an_all_reduce_over_two_levels_by_reduces():
    passes("08.1", by_reduces)


def test_the_first_difference_of_other_sums_is_shown():
    fails(
        "08.1", lambda x, inside, across, i, a: dist.all_reduce(x, group=inside), "2 nodes of 2 ranks", "[585], got [9]"
    )


@pytest.mark.long
def test_seconds_that_are_missing():
    def no_seconds(*about):
        in_tensors(*about)

    fails("08.1", no_seconds, "3 MB/s inside, 3 MB/s across", "got 'None'")


def by_epochs(job):
    """Loops over epochs and batches, and skips what is done."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    box = [job.newest()] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    done, state = box[0] or (0, None)
    if state is not None:
        job.load_state(state)
    step = 0
    for epoch in range(job.epochs):
        order = job.order(epoch)
        for first in range(0, len(order), job.batch):
            step += 1
            if step <= done:
                continue
            job.train(order[first : first + job.batch][rank::ranks])
            votes = [None] * ranks
            dist.all_gather_object(votes, job.stopping())
            last = step == job.epochs * job.steps_per_epoch
            if rank == 0 and (any(votes) or last or step % job.save_every == 0):
                job.save(step, job.state())
            if any(votes):
                return


def test_a_run_that_survives():
    passes("08.2", by_epochs)


@pytest.mark.long
def test_saves_on_every_rank():
    def every_rank(job):
        nb08.survive(job)
        if dist.get_rank() == 1:
            job.save(nb08.STEPS, job.state())

    fails("08.2", every_rank, "undisturbed: ranks that save", "[0], got [0, 1]")
