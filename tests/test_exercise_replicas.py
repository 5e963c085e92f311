"""Exercise 10.2: right checks of other styles pass, every mistake has its name, nothing is left behind."""

from __future__ import annotations

import builtins
import os
import sys
import zlib

import pytest
import torch
import torch.distributed as dist
from mutants.nb10_replicas import RARER, way
from speeds import first

from labs.chapters.nb10 import exercise_replicas
from labs.chapters.nb10.exercise_replicas import CASES, MOST_BYTES, check_replica_check, model
from labs.kit import answers
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake, examine


def _named(module):
    yield from module.named_parameters()
    yield from module.named_buffers()


def in_integers(module, rank, world):
    """No digest from a library: every byte times an odd number of its place, modulo 2**64; flags by all_reduce."""

    def digest(t):
        b = t.detach().flatten().contiguous().view(torch.uint8).long() + 1
        place = torch.arange(len(b))
        return (b * ((place * 6364136223846793005 + 1442695040888963407) | 1)).sum()

    mine = torch.stack([digest(t) for _, t in _named(module)])
    first = mine.clone()
    dist.broadcast(first, 0)
    other = torch.zeros(world, len(mine), dtype=torch.int32)
    other[rank] = mine != first
    dist.all_reduce(other)
    for i, (name, _) in enumerate(_named(module)):
        if other[:, i].any():
            return [name, other[:, i].nonzero().flatten()]
    return None


def coarse_then_fine(module, rank, world):
    """One number for everything; only if it differs, one for each tensor, asked one after the other by all ranks."""

    def same(number):
        every = [torch.zeros((), dtype=torch.int64) for _ in range(world)]
        dist.all_gather(every, torch.tensor(number))
        return [r for r in range(world) if every[r] != every[0]]

    tensors = [
        (name, zlib.crc32(bytes(t.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist())))
        for name, t in _named(module)
    ]
    if same(zlib.crc32(repr(tensors).encode())):
        for name, number in tensors:
            if others := same(number):
                return name, others
    return None


@pytest.mark.parametrize("right", first(1, [in_integers, coarse_then_fine, way()]))
def test_right_checks_of_any_style_pass(right):
    check_replica_check(right)


@pytest.mark.parametrize("name", first(2, RARER))
def test_rarer_mistakes_have_their_name(name):
    wrong, words = RARER[name]
    with pytest.raises(Mistake) as found:
        check_replica_check(wrong)
    assert words in str(found.value)


def test_every_planted_change_changes_bits_and_only_there():
    for case in CASES:
        for rank, plant in case.plants:
            clean, m = model(), model()
            with torch.no_grad():
                plant(m)
            one, other = (dict(_named(each)) for each in (clean, m))
            changed = [n for n in one if exercise_replicas._bits(one[n]) != exercise_replicas._bits(other[n])]
            assert len(changed) == 1, case.words
            assert changed == [case.answer[0]] or rank not in case.answer[1] or rank == 0


def test_exchanged_numbers_keep_sums_and_numbers_hide_the_last_integer():
    m, clean = model(), model()
    with torch.no_grad():
        exercise_replicas._shift(m)
        exercise_replicas._buffer(m)
    assert m.embedding.weight.sum() == clean.embedding.weight.sum()
    assert m.seen.double().sum() == clean.seen.double().sum()


def test_bytes_are_counted_and_the_digests_stay_far_below_the_limit():
    sent = [one.sent for rank in on_ranks(exercise_replicas._body, 2, way(), [0, 1], when="") for one in rank]
    if None in sent:
        pytest.skip("this kernel does not count bytes")
    assert max(sent) < MOST_BYTES / 4
    assert sum(t.nbytes for _, t in _named(model())) > 50 * MOST_BYTES


def test_the_hash_of_another_process_is_salted_and_taken_back():
    real = builtins.hash
    with exercise_replicas._hash_of_this_process(1) as used:
        assert hash("text") != real("text") and hash(7) == real(7)
        assert used == ["str"]
    assert builtins.hash is real


def test_leaving_the_process_is_told(monkeypatch):
    monkeypatch.setattr(answers, "RUN_S", 15.0)
    for leave in (lambda module, rank, world: os._exit(3), lambda module, rank, world: sys.exit()):
        outcome = examine("10.2", leave)
        assert outcome.state == "not yet", outcome.text
