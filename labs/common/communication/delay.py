"""A slow wire acted out: whoever exchanges waits as long as a formula says. Emulated: no byte is held back.

For systems whose kernel cannot pace a connection (macOS). Because the waiting
comes from the ring's formula, such a wire says nothing about that formula.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.tensors import nbytes

EMULATED = "The wire is acted out: each exchange waits as long as the ring's formula says, no byte is held back."


@dataclass
class Delay:
    """A wire that takes one exchange after the other."""

    b_s: float = math.inf
    free_s: float = 0.0
    """Of time.perf_counter(): when the wire has carried all that it was given."""

    def carry(self, sent_bytes: float) -> float:
        """Give the wire `sent_bytes` more; returns when it has carried them."""
        self.free_s = max(time.perf_counter(), self.free_s) + sent_bytes / self.b_s
        return self.free_s


_delays: list[Delay] = []  # of this process: none, or the one that is acted out now


@contextmanager
def acted_out(b_s: float = math.inf) -> Iterator[None]:
    """Exchanges by `all_reduce` and by DDP's hooks made with `holding` wait as on a wire like this."""
    if b_s < math.inf:
        _delays[:] = [Delay(b_s)]
    try:
        yield
    finally:
        _delays.clear()


def _until(future: Future, carried_s: float) -> Future:
    """`future`, done no earlier than `carried_s`. It waits in gloo's thread, not here."""

    def wait(done: Future) -> Any:
        time.sleep(max(0.0, carried_s - time.perf_counter()))
        return done.value()

    return future.then(wait)


def all_reduce(x: Tensor) -> None:
    """`dist.all_reduce`; over the delayed wire if one is acted out."""
    if not _delays:
        dist.all_reduce(x)
        return
    carried_s = _delays[0].carry(ring_all_reduce_bytes(nbytes(x), dist.get_world_size()))
    _until(dist.all_reduce(x, async_op=True).get_future(), carried_s).wait()


def ring_bytes(bucket: dist.GradBucket) -> float:
    """Bytes that each rank sends of a bucket, as it is, in a ring."""
    return ring_all_reduce_bytes(nbytes(bucket.buffer()), dist.get_world_size())


def holding(hook: Callable = allreduce_hook, sent_bytes: Callable[[dist.GradBucket], float] = ring_bytes) -> Callable:
    """DDP's communication hook `hook`, over the delayed wire if one is acted out when it is called."""

    def delaying_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not _delays:
            return hook(state, bucket)
        carried_s = _delays[0].carry(sent_bytes(bucket))  # the wire begins now; compressing goes on meanwhile
        return _until(hook(state, bucket), carried_s)

    return delaying_hook


def hold(ddp: DistributedDataParallel) -> None:
    """Give `ddp` its own all-reduce as a hook that waits if a wire is acted out."""
    ddp.register_comm_hook(None, holding())
