"""One rank of a job of any size, in one process: torch's own fake process group, whose messages go nowhere.

    with fake_job(4096, rank=0):
        model = DistributedDataParallel(model)        # the same lines as on real ranks

Every collective returns at once and leaves in its buffers what was there. So calls, their buffers' sizes, groups and
memory are those of a real rank; numbers, waiting and time are not (pytorch/torchtitan pull request 4652 says so, too).
torch does not promise to keep this part: it is imported here only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labs.kit import _compat
from labs.kit.errors import require

CANNOT_SHOW = {
    "results": "No message arrives, so sums, losses and gradients are wrong: parity needs real ranks.",
    "time": "Nobody waits: neither latency, bandwidth, overlap nor stragglers are there.",
    "order": "Ranks that call collectives in different orders would hang; one rank alone does not notice.",
    "pipelines": "Receives return at once: a schedule's order, its deadlocks and its buffers' lives are not tried.",
    "paths": "Which ring, tree or network path a library takes is not known: levels are split as a ring in rank order.",
    "other ranks": "One rank is built, not all: ranks that hold more, or send more, must be asked one by one.",
    "the start": "Rendezvous, set-up of connections and reading of checkpoints do not happen.",
    "failures": "No rank dies, no network card is slow, no message is lost.",
}
"""What fake ranks leave out. Sources: pytorch/torchtitan pull requests 4652 (numerics, behaviour of collectives,
performance; pipelines need real groups) and 4015 (no checkpoints, no validation); the rest follows from what
torch/testing/_internal/distributed/fake_pg.py says of itself: it does no communication."""


@contextmanager
def fake_job(ranks: int, rank: int = 0) -> Iterator[None]:
    """Within, this process is rank `rank` of `ranks`. BadInput if it is in a job already, or torch has moved this."""
    require(0 <= rank < ranks, f"there is no rank {rank} among {ranks}")
    require(not dist.is_initialized(), "this process is a rank of a job already: leave it first, or use another one")
    dist.init_process_group("fake", store=_compat.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def out_of_job() -> Iterator[None]:
    """Within, this process belongs to no job; afterwards the ranks that did meet again. Collective, on CPU ranks.

    Other groups than the one of all ranks do not come back.
    """
    meeting = dist.PrefixStore("after fake ranks", _compat.default_store())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a rank that leaves at once closes connections which another one may still be making
    dist.destroy_process_group()
    try:
        yield
    finally:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)


def all_reduce_hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by default, as a communication hook: the default one reads a result that no fake group has."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer() / dist.get_world_size())
    return done


# DDP compares a hook's annotations with these types, and `from __future__ import annotations` made strings of them.
all_reduce_hook.__annotations__.update(bucket=dist.GradBucket)
all_reduce_hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
