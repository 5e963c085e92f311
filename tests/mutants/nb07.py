"""Typical mistakes in notebook 07: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labs.all_reduce_anatomy import ring
from labs.chapters.nb07 import solutions as solution


def _swap(x, partner):
    other = torch.empty_like(x)
    sending = dist.isend(x, partner)
    dist.recv(other, partner)
    sending.wait()
    return other


def _doubling(x, exchange=_swap):
    """Right on powers of two."""
    rank, step = dist.get_rank(), 1
    while step < dist.get_world_size():
        if rank ^ step < dist.get_world_size():
            x += exchange(x, rank ^ step)
        step *= 2


def _both_send_first(x):
    def exchange(x, partner):
        other = torch.empty_like(x)
        dist.send(x, partner)
        dist.recv(other, partner)
        return other

    _doubling(x, exchange)


def _powers_of_two_only(x):
    _doubling(x)


def _ring(x):
    if dist.get_world_size() > 1:
        ring.ring_all_reduce(x)


def _tree(x):
    rank, ranks, step = dist.get_rank(), dist.get_world_size(), 1
    other = torch.empty_like(x)
    while step < ranks:  # up to rank 0
        if rank % (2 * step) == step:
            dist.send(x, rank - step)
        elif rank % (2 * step) == 0 and rank + step < ranks:
            dist.recv(other, rank + step)
            x += other
        step *= 2
    while step > 1:  # and down again
        step //= 2
        if rank % (2 * step) == step:
            dist.recv(x, rank - step)
        elif rank % (2 * step) == 0 and rank + step < ranks:
            dist.send(x, rank + step)


def _all_to_rank_0(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    others = [torch.empty_like(x) for _ in range(1, ranks)]
    for peer, other in enumerate(others, 1):
        dist.recv(other, peer)
        x += other
    for peer in range(1, ranks):
        dist.send(x, peer)


def _changed_on_the_way(x):
    def exchange(x, partner):
        other = torch.empty_like(x)
        sending = dist.isend(x, partner)
        dist.recv(other, partner)
        x += other
        sending.wait()
        return 0

    _doubling(x, exchange)


def _not_in_place(x):
    solution.all_reduce_small(x.clone())


def _each_its_own_order(x):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known = [x.clone()]  # of this rank, the one before, the one before that ...
    while len(known) < ranks:
        away, few = len(known), min(len(known), ranks - len(known))
        arrive = torch.empty(few, len(x))
        sending = dist.isend(torch.stack(known[:few]), (rank + away) % ranks)
        dist.recv(arrive, (rank - away) % ranks)
        sending.wait()
        known += list(arrive)
    x.copy_(sum(known))


MUTANTS = {
    "07.1": {
        "both send first": (_both_send_first, "If both send first, neither does"),
        "powers of two only": (_powers_of_two_only, "on 3 ranks rank 1 ends with"),
        "ring": (_ring, "this is a ring"),
        "tree": (_tree, "up to one rank and down again"),
        "all to rank 0": (_all_to_rank_0, "one after the other"),
        "changed on the way": (_changed_on_the_way, "while it is being sent"),
        "not in place": (_not_in_place, "nothing was written into it"),
        "each its own order": (_each_its_own_order, "differ in their last bits"),
    },
}


def _done(result):
    done = torch.futures.Future()
    done.set_result(result)
    return done


def _hook(
    feedback=True,
    scale=None,
    limit=127,
    mean=True,
    name=None,
    sum_bytes=False,
    sends_floats=False,
    error=lambda wanted, sent, mean: wanted - sent,
):
    """A hook that is right by default, with as many mistakes as there are arguments."""

    def eight_bits(state, bucket):
        ranks = dist.get_world_size()
        key = (bucket.index(), len(bucket.buffer())) if name is None else name(bucket)
        wanted = bucket.buffer() + (state.get(key, 0.0) if feedback else 0.0)
        step = (wanted.abs().max().clamp(min=1e-30) / limit) if scale is None else scale(wanted)
        code = (wanted / step).round().clamp(-127, 127).to(torch.int8)
        state[key] = wanted - code * step
        if sum_bytes:
            dist.all_reduce(code)
            return _done(code * step / ranks)
        if sends_floats:
            total = code * step
            dist.all_reduce(total)
            return _done(total / ranks)
        steps, codes = [torch.empty_like(step) for _ in range(ranks)], [torch.empty_like(code) for _ in range(ranks)]
        dist.all_gather(steps, step)
        dist.all_gather(codes, code)
        total = sum(c * s for c, s in zip(codes, steps, strict=True))
        state[key] = error(wanted, code * step, total / ranks)
        return _done(total / ranks if mean else total)

    return eight_bits


def _agreed(wanted):
    most = wanted.abs().max().clamp(min=1e-30)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most / 127


MUTANTS["07.2"] = {
    "no error feedback": (_hook(feedback=False), "in every step it is rounded away"),
    "sum": (_hook(mean=False), "that is the sum"),
    "floats on the wire": (_hook(sends_floats=True), "bytes for each, not 1"),
    "fixed scale": (_hook(scale=lambda wanted: torch.tensor(1 / 63)), "if others decided how fine"),
    "bytes summed over their limit": (_hook(scale=_agreed, sum_bytes=True), "does not fit into 8 bits"),
    "own scale for another's bytes": (_hook(limit=40, sum_bytes=True), "get other gradients from the same exchange"),
    "the mean taken for what was sent": (
        _hook(error=lambda wanted, sent, mean: wanted - mean),
        "not the mean that comes",
    ),
    "one error for all buckets": (_hook(name=lambda bucket: "error"), "bucket of another length"),
}
