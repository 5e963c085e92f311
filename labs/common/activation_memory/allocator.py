"""How many bytes are alive during a step: asked of the allocator, or counted on tensors that have no memory."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from labs.kit import measure
from labs.kit._compat import TorchDispatchMode, storage_key

MARK = "forward has ended"


@dataclass(frozen=True)
class Live:
    """Bytes alive beyond those that were there before."""

    after_forward: int
    """What forward leaves behind: what backward needs, and the loss."""
    peak: int
    changes: tuple[int, ...] = ()
    """After every allocation and release, in order; empty where only the peak is known."""


def watch(forward: Callable[[], Tensor], backward: Callable[[Tensor], object], device: torch.device) -> Live:
    """Bytes alive in `backward(forward())` on `device`, from its allocator: with temporaries inside of kernels."""
    if device.type == "cuda":
        return _cuda(forward, backward, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would print its start and its stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with record_function(MARK):
            pass
        backward(loss)
    events = profiler.profiler.kineto_results.events()
    mark = next(e.start_ns() for e in events if e.name() == MARK)
    steps = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    changes = tuple(itertools.accumulate((size for _, _, size in steps), initial=0))
    done = sum(when <= mark for when, _, _ in steps)
    return Live(changes[done], max(changes), changes)


def _cuda(forward: Callable[[], Tensor], backward: Callable[[Tensor], object], device: torch.device) -> Live:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    loss = forward()
    after = torch.cuda.memory_allocated(device)
    backward(loss)
    measure.sync(device)
    return Live(after - before, torch.cuda.max_memory_allocated(device) - before)


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that are alive and were made inside: also of fake tensors.

    Unlike an allocator it sees no workspace inside of an operation.
    """

    def __init__(self, there: nn.Module | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        known = [*there.parameters(), *there.buffers()] if there else []
        self.alive = {storage_key(t.untyped_storage()): 0 for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key not in self.alive:
            self.alive[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def slices(changes: tuple[int, ...], count: int) -> list[int]:
    """`changes` cut into `count` slices of equally many, in order; the largest of each."""
    ends = [round(i * len(changes) / count) for i in range(count + 1)]
    last = len(changes) - 1
    return [max(changes[min(a, last) : max(b, a + 1)]) for a, b in itertools.pairwise(ends)]
