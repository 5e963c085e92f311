"""Checkers of notebook 07: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from speeds import first

from labs.chapters.nb07 import exercise_messages
from labs.chapters.nb07 import solutions as solution
from labs.chapters.nb07.exercise_messages import most_rounds
from labs.chapters.nb07.traffic import rounds
from labs.kit.check import Mistake, examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def says(exercise_id, candidate, words):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


# -- 07.1


def everything_then_one_sum(x):
    """Bruck's all-gather, and the sum in the order of the ranks: 2^k - 1 vectors in the message of round k."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known = x.clone()[None]  # of this rank, the next one, ...
    while len(known) < ranks:
        few = min(len(known), ranks - len(known))
        arrive = torch.empty(few, len(x))
        ops = [
            dist.P2POp(dist.isend, known[:few].contiguous(), (rank - len(known)) % ranks),
            dist.P2POp(dist.irecv, arrive, (rank + len(known)) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        known = torch.cat([known, arrive])
    x.copy_(known.roll(rank, 0).sum(0))


def neighbours_fold(x):
    """Even and odd ranks at the beginning make pairs, until a power of two is left (as MPICH does)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    core = 2 ** (ranks.bit_length() - 1)
    paired = 2 * (ranks - core)
    other = torch.empty_like(x)
    if rank < paired and rank % 2:
        dist.isend(x.clone(), rank - 1).wait()
        return dist.irecv(x, rank - 1).wait() and None
    if rank < paired:
        dist.irecv(other, rank + 1).wait()
        x.add_(other)
    own = rank // 2 if rank < paired else rank - paired // 2
    for k in range(core.bit_length() - 1):
        partner = own ^ (1 << k)
        partner = 2 * partner if partner < paired // 2 else partner + paired // 2
        arrives, leaves = dist.irecv(other, partner), dist.isend(x.clone(), partner)
        arrives.wait()
        leaves.wait()
        x.copy_(x + other)
    if rank < paired:
        dist.isend(x.clone(), rank + 1).wait()


@pytest.mark.parametrize("right", first(1, [everything_then_one_sum, neighbours_fold]))
def test_other_all_reduces_pass(right):
    passes("07.1", right)


def test_a_collective_is_told():
    says("07.1", lambda x: dist.all_reduce(x), "you call a collective (allreduce)")


def with_exchange(exchange):
    def all_reduce_small(x):
        rank, ranks, step = dist.get_rank(), dist.get_world_size(), 1
        while step < ranks:
            if rank ^ step < ranks:
                exchange(x, rank ^ step)
            step *= 2

    return all_reduce_small


def test_a_message_that_nobody_waits_for_is_told():
    def exchange(x, partner):
        other = torch.zeros_like(x)
        dist.irecv(other, partner)
        dist.isend(x.clone(), partner).wait()
        x += other

    says("07.1", with_exchange(exchange), "never waited for")


def test_one_direction_at_a_time_is_told():
    def all_reduce_small(x):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if ranks & (ranks - 1):
            return solution.all_reduce_small(x)
        for k in range(ranks.bit_length() - 1):
            partner, other = rank ^ (1 << k), torch.empty_like(x)
            if rank < partner:
                dist.send(x, partner)
                dist.recv(other, partner)
            else:
                dist.recv(other, partner)
                dist.send(x, partner)
            x += other

    says("07.1", all_reduce_small, "sends only after it has received")


@pytest.mark.long
def test_everybody_to_everybody_is_told():
    def all_reduce_small(x):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        every = [x.clone() if r == rank else torch.empty_like(x) for r in range(ranks)]
        peers = [r for r in range(ranks) if r != rank]
        works = [dist.isend(every[rank], r) for r in peers] + [dist.irecv(every[r], r) for r in peers]
        for work in works:
            work.wait()
        x.copy_(sum(every))

    says("07.1", all_reduce_small, "every rank sends to every other")


@pytest.mark.parametrize(("ranks", "words"), [(2, "both send first"), (3, "must be below 3"), (4, "both send first")])
def test_the_hint_of_a_hang_knows_whether_ranks_are_a_power_of_two(monkeypatch, ranks, words):
    def hangs(*args, **kwargs):
        raise Mistake("the ranks wait for each other for ever")

    monkeypatch.setattr(exercise_messages, "on_ranks", hangs)
    with pytest.raises(Mistake, match=words):
        exercise_messages._run(solution.all_reduce_small, ranks)


@pytest.mark.long
def test_a_rank_without_a_partner_on_one_rank_is_told():
    def all_reduce_small(x):
        if dist.get_world_size() == 1:
            x += x
        else:
            solution.all_reduce_small(x)

    says("07.1", all_reduce_small, "on one rank rank 0 ends with rank 0's numbers 2 times")


def test_rounds_of_logs_by_hand():
    there, back = [("send", 0, 1, 0, 5), ("got", 1, 0)], [("send", 0, 0, 0, 5), ("got", 0, 0)]
    assert rounds([there, back]) == 1  # both at once
    assert rounds([there, back[::-1]]) == 2  # the second sends when it has received
    star = [[("send", k, k + 1, 0, 5) for k in range(3)], *([("got", 0, 0)] for _ in range(3))]
    assert rounds(star) == 3  # one at a time out of rank 0
    assert rounds([[("got", 1, 0), ("got", 2, 0)], *([("send", 0, 0, 0, 5)] for _ in range(2))]) == 2
    assert rounds([[], []]) == 0
    assert [most_rounds(n) for n in (1, 2, 3, 4, 6, 8)] == [0, 1, 3, 2, 4, 3]


# -- 07.2


def shared_scale(state, bucket):
    """Ranks agree on one scale; then bytes are small enough to be summed by the collective, without waiting."""
    ranks, errors = dist.get_world_size(), state.setdefault("errors", {})
    for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True):  # views into the bucket
        g += errors.get(p, 0.0)
    wanted, levels = bucket.buffer(), 127 // ranks
    most = wanted.abs().max()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    scale = most / levels if most > 0 else torch.tensor(1.0)
    code = (wanted / scale).round().to(torch.int8)
    left = wanted - code * scale
    start = 0
    for p in bucket.parameters():
        errors[p] = left[start : start + p.numel()].view_as(p)
        start += p.numel()
    return dist.all_reduce(code, async_op=True).get_future().then(lambda f: f.value()[0] * scale / ranks)


def drawn(state, bucket):
    """Rounded up or down at random; scale and bytes in one message."""
    ranks, key = dist.get_world_size(), (bucket.index(), len(bucket.buffer()))
    wanted = bucket.buffer() + state.get(key, 0.0)
    scale = wanted.abs().max() / 126
    code = torch.zeros_like(wanted) if scale == 0 else (wanted / scale + torch.rand_like(wanted)).floor()
    state[key] = wanted - code * scale
    message = torch.cat([code.to(torch.int8), scale[None].view(torch.int8)])
    every = [torch.empty_like(message) for _ in range(ranks)]
    dist.all_gather(every, message)
    total = torch.zeros_like(wanted)
    for m in every:
        total += m[:-4].float() * m[-4:].clone().view(torch.float32)
    done = torch.futures.Future()
    done.set_result(total / ranks)
    return done


def test_a_hook_that_ddp_refuses_is_told_why():
    def other_name(state, b):
        return solution.eight_bits(state, b)

    def other_future(state, bucket) -> torch.futures.Future:
        return solution.eight_bits(state, bucket)

    assert "by its name" in examine("07.2", other_name).text
    assert "refuses the annotations" in examine("07.2", other_future).text


@pytest.mark.parametrize("right", first(1, [shared_scale, drawn]))
def test_other_hooks_pass(right):
    passes("07.2", right)


def test_a_hook_without_a_future_is_told():
    says("07.2", lambda state, bucket: bucket.buffer(), "DDP wants a future")


@pytest.mark.long
def test_a_scale_that_is_kept_from_the_first_step_is_told():
    def eight_bits(state, bucket):
        name = tuple(map(id, bucket.parameters()))
        left, scale = state.setdefault(name, (0.0, bucket.buffer().abs().max().clamp(min=1e-30) / 127))
        wanted = bucket.buffer() + left
        code = (wanted / scale).round().clamp(-127, 127).to(torch.int8)
        state[name] = wanted - code * scale, scale
        ranks = dist.get_world_size()
        every = [torch.empty_like(code) for _ in range(ranks)], [torch.empty_like(scale) for _ in range(ranks)]
        dist.all_gather(every[0], code)
        dist.all_gather(every[1], scale)
        done = torch.futures.Future()
        done.set_result(sum(c * s for c, s in zip(*every, strict=True)) / ranks)
        return done

    says("07.2", eight_bits, "the scale is still that of them")


def test_an_error_that_fades_is_told():
    def eight_bits(state, bucket):
        done = solution.eight_bits(state, bucket)
        name = tuple(map(id, bucket.parameters()))
        state[name] = 0.9 * state[name]
        return done

    says("07.2", eight_bits, "what is left out fades before it has grown to a step of the code")


@pytest.mark.long
def test_a_scale_of_zero_that_makes_nan_is_told():
    def eight_bits(state, bucket):
        done = solution.eight_bits(state, bucket)
        most = bucket.buffer().abs().max()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        mean = torch.futures.Future()
        mean.set_result(done.value() / most * most)
        return mean

    says("07.2", eight_bits, "all its gradients are zero, and so is its scale")
