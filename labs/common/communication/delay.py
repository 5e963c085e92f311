"""An emulated slow network: each exchange waits as long as a formula says, although no byte is held back.

For systems whose kernel can't pace a connection (macOS). The wait comes from the ring's formula, so such a run can't
test that formula.

DDP refuses hooks whose annotations are strings, so this module has no `from __future__ import annotations`.
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

EMULATED = "The slow network is emulated: each exchange waits as long as the ring's formula says; no byte is held back."


@dataclass
class Delay:
    """A connection that carries one exchange after the other, at `b_s` byte/s."""

    b_s: float = math.inf
    free_s: float = 0.0
    """When it has carried everything so far, by time.perf_counter()."""

    def carry(self, sent_bytes: float) -> float:
        """Queue `sent_bytes` more; return when they will have arrived."""
        self.free_s = max(time.perf_counter(), self.free_s) + sent_bytes / self.b_s
        return self.free_s


_delays: list[Delay] = []  # of this process: empty, or the active one


@contextmanager
def acted_out(b_s: float = math.inf) -> Iterator[None]:
    """Make exchanges by `all_reduce` and by hooks from `holding` wait as on such a connection."""
    if b_s < math.inf:
        _delays[:] = [Delay(b_s)]
    try:
        yield
    finally:
        _delays.clear()


def _until(future: Future, carried_s: float) -> Future:
    """Delay `future` until at least `carried_s`. It waits in gloo's thread, not here."""

    def wait(done: Future) -> Any:
        time.sleep(max(0.0, carried_s - time.perf_counter()))
        return done.value()

    return future.then(wait)


def all_reduce(x: Tensor) -> None:
    """Run `dist.all_reduce`, over the emulated connection if one is active."""
    if not _delays:
        dist.all_reduce(x)
        return
    carried_s = _delays[0].carry(ring_all_reduce_bytes(nbytes(x), dist.get_world_size()))
    _until(dist.all_reduce(x, async_op=True).get_future(), carried_s).wait()


def ring_bytes(bucket: dist.GradBucket) -> float:
    """Return the bytes that each rank sends for an uncompressed bucket in a ring."""
    return ring_all_reduce_bytes(nbytes(bucket.buffer()), dist.get_world_size())


def holding(hook: Callable = allreduce_hook, sent_bytes: Callable[[dist.GradBucket], float] = ring_bytes) -> Callable:
    """Wrap DDP's communication hook `hook` to wait for the emulated connection, if one is active when it is called."""

    def delaying_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if not _delays:
            return hook(state, bucket)
        carried_s = _delays[0].carry(sent_bytes(bucket))  # sending starts now, while the hook compresses
        return _until(hook(state, bucket), carried_s)

    return delaying_hook


def hold(ddp: DistributedDataParallel) -> None:
    """Give `ddp` its default all-reduce as a hook that waits for the emulated connection, if one is active."""
    ddp.register_comm_hook(None, holding())
