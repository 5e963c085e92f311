"""Typical mistakes in exercise 10.2: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def _digest(t):
    return hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _everything(module):
    return [*module.named_parameters(), *module.named_buffers()]


def way(digest=_digest, of=_everything, look=range):
    """A right check that sends objects; `look(world)`: the ranks that are looked at."""

    def replica_check(module, rank, world):
        every = [None] * world
        dist.all_gather_object(every, [digest(t) for _, t in of(module)])
        for i, (name, _) in enumerate(of(module)):
            if others := [r for r in look(world) if every[r][i] != every[0][i]]:
                return name, others
        return None

    return replica_check


def _nan(t):
    """Weighted by the place, and compared as a number."""
    x = t.detach().double().reshape(-1)
    return float((x * torch.arange(1, len(x) + 1)).sum())


def _broadcast(module, rank, world):
    found = None
    for name, t in _everything(module):
        mine = t.detach().clone()
        dist.broadcast(t.data, 0)
        every = [None] * world
        dist.all_gather_object(every, _digest(mine) != _digest(t))
        if any(every) and found is None:
            found = name, [r for r in range(world) if every[r]]
    return found


def _whole(module, rank, world):
    for name, t in _everything(module):
        t = t.detach().contiguous().reshape(-1).view(torch.uint8)
        every = [torch.empty_like(t) for _ in range(world)]
        dist.all_gather(every, t)
        if others := [r for r in range(world) if not torch.equal(every[r], every[0])]:
            return name, others
    return None


def _own_stop(module, rank, world):
    """Each rank stops at the first tensor in which it differs from rank 0; rank 0 and the others go on."""
    for name, t in _everything(module):
        first = [_digest(t)]
        dist.broadcast_object_list(first, 0)
        if first[0] != _digest(t):
            return name, [rank]
    return None


def _rank_0_knows(module, rank, world):
    every = [None] * world if rank == 0 else None
    dist.gather_object([_digest(t) for _, t in _everything(module)], every, 0)
    for i, (name, _) in enumerate(_everything(module)):
        if rank == 0 and (others := [r for r in range(world) if every[r][i] != every[0][i]]):
            return name, others
    return None


def _seeded(module, rank, world):
    """Random weights for the bytes, drawn from the default generator: it is the same afterwards on all ranks."""

    def digest(t):
        torch.manual_seed(3)
        b = t.detach().contiguous().reshape(-1).view(torch.uint8).long()
        return int((b * torch.randint(2**40, b.shape)).sum())

    return way(digest)(module, rank, world)


def _truth(module, rank, world):
    return way()(module, rank, world) is None


def _pair_of_nothing(module, rank, world):
    return way()(module, rank, world) or (None, [])


MUTANTS = {
    "10.2": {
        "sums": (way(lambda t: float(t.detach().double().nan_to_num().sum())), "sums, means and norms stay"),
        "ranks 0 and 1": (way(look=lambda world: [1]), "what differs on rank 1 you find"),
        "parameters only": (way(of=lambda m: list(m.named_parameters())), "buffers are a part of the model"),
        "hash()": (way(lambda t: hash(_digest(t))), "hash() of bytes or text is salted"),
        "NaN is not NaN": (way(_nan), "NaN == NaN is False"),
        "broadcasts the model": (_broadcast, "the drift is written over"),
        "all_gather of everything": (_whole, "bytes for one check of a model of"),
        "each rank stops for itself": (_own_stop, "the ranks wait for each other for ever in your check"),
    }
}
RARER = {
    "a state_dict": (way(of=lambda m: list(m.state_dict().items())), "leaves out what is not persistent"),
    "only rank 0 knows": (_rank_0_knows, "all ranks must know it"),
    "the random state": (_seeded, "torch's random state is no longer"),
    "a pair in place of None": (_pair_of_nothing, "you return (None, [])"),
    "true or false": (_truth, "you return True"),
    "as numbers": (
        way(lambda t: hashlib.md5(t.detach().double().reshape(-1).add(0.0).numpy().tobytes()).hexdigest()),
        "an int64 above 2**53",
    ),
    "buffers first": (way(of=lambda m: [*m.named_buffers(), *m.named_parameters()]), "parameters before buffers"),
}
"""More mistakes of other kinds, tried by tests/test_exercise_replicas.py."""
