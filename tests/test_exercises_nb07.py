"""Exercises of notebook 07: right answers of another style pass, and wrong ones are shown where they differ."""

import pytest
import torch
import torch.distributed as dist

from labs.exercises import nb07
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def gather_in_doubling(x):
    """Every rank collects the numbers of all, in few rounds, and adds them in the same order."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    core = 1 << (ranks.bit_length() - 1)
    table = torch.zeros(ranks, len(x))
    table[rank] = x
    if rank >= core:
        dist.send(x, rank - core)
        dist.recv(x, rank - core)
        return
    if rank + core < ranks:
        dist.recv(table[rank + core], rank + core)
    step = 1
    while step < core:
        other = torch.empty_like(table)
        requests = [dist.P2POp(dist.isend, table.clone(), rank ^ step), dist.P2POp(dist.irecv, other, rank ^ step)]
        for work in dist.batch_isend_irecv(requests):
            work.wait()
        table += other
        step *= 2
    x.copy_(table.sum(0))
    if rank + core < ranks:
        dist.send(x, rank + core)


def both_ways_at_once(x):
    """Recursive doubling with isend and irecv, guests paired with odd partners."""
    rank, ranks, core = dist.get_rank(), dist.get_world_size(), 1
    while 2 * core <= ranks:
        core *= 2
    guest, host = rank - core, rank + core
    if guest >= 0:
        dist.isend(x.clone(), guest).wait()
        dist.irecv(x, guest).wait()
        return
    if host < ranks:
        other = torch.zeros_like(x)
        dist.irecv(other, host).wait()
        x.add_(other)
    for k in range(core.bit_length() - 1):
        partner, other = rank ^ (1 << k), torch.zeros_like(x)
        receiving, sending = dist.irecv(other, partner), dist.isend(x.clone(), partner)
        receiving.wait()
        sending.wait()
        x.add_(other)
    if host < ranks:
        dist.isend(x.clone(), host).wait()


@pytest.mark.parametrize("answer", [gather_in_doubling, both_ways_at_once])
def test_other_ways_of_few_rounds(answer):
    passes("07.1", answer)


def test_rounds_of_a_chain_add_up_and_of_pairs_do_not():
    chain = [[("send", 0, 1, 0), ("sent", 0)], [("got", 0, 0), ("send", 0, 2, 0), ("sent", 0)], [("got", 1, 0)]]
    pair = [[("send", 0, r ^ 1, 0), ("got", r ^ 1, 0), ("sent", 0)] for r in range(4)]
    assert nb07.rounds(chain) == 2 and nb07.rounds(pair) == 1
    assert [nb07.most_rounds(n) for n in (1, 2, 3, 4, 6, 8)] == [0, 1, 3, 2, 4, 3]


def one_scale_for_all(state, bucket):
    """All ranks agree on a scale first; int8 both ways, and the rank that rounds a mean keeps what that left out."""
    rank, ranks, key = dist.get_rank(), dist.get_world_size(), tuple(map(id, bucket.parameters()))
    gradient = bucket.buffer() + state.get(key, 0)
    scale = gradient.abs().max()
    dist.all_reduce(scale, op=dist.ReduceOp.MAX)
    scale = scale / 127 + 1e-30
    length = -(-len(gradient) // ranks)
    code = torch.zeros(ranks * length)
    code[: len(gradient)] = torch.round(gradient / scale)
    rest = torch.zeros(ranks * length)
    rest[: len(gradient)] = gradient - code[: len(gradient)] * scale
    parts = torch.empty(ranks, length, dtype=torch.int8)
    dist.all_to_all_single(parts, code.to(torch.int8).view(ranks, length))
    mean = parts.float().mean(0)
    rounded = mean.round()
    rest[rank * length : (rank + 1) * length] += ranks * (mean - rounded) * scale
    state[key] = rest[: len(gradient)]
    means = [torch.empty(length, dtype=torch.int8) for _ in range(ranks)]
    dist.all_gather(means, rounded.to(torch.int8))
    return (
        dist.all_reduce(torch.zeros(1), async_op=True)
        .get_future()
        .then(lambda _: torch.cat(means)[: len(gradient)].float() * scale)
    )


def test_int8_both_ways_with_one_scale():
    passes("07.2", one_scale_for_all)


def test_sixteen_bits_both_ways_are_shown_as_too_many_bytes():
    def sixteen(state, bucket):
        mean = bucket.buffer().bfloat16() / dist.get_world_size()
        dist.all_reduce(mean)
        done = torch.futures.Future()
        done.set_result(mean.float())
        return done

    text = examine("07.2", sixteen).text
    assert "on 5 ranks: bytes that a rank sends per gradient" in text and "3.1" in text, text
