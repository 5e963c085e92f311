"""Bytes alive during a step, according to the device's allocator."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from labs.kit import measure

MARK = "forward has ended"


@dataclass(frozen=True)
class Live:
    """Bytes alive beyond those that existed before."""

    after_forward: int
    """Left by forward: what backward needs, and the loss."""
    peak: int
    changes: tuple[int, ...] = ()
    """Live bytes after every allocation and release, in order; empty if only the peak is known."""


def watch(forward: Callable[[], Tensor], backward: Callable[[Tensor], object], device: torch.device) -> Live:
    """Measure bytes alive in `backward(forward())` from the allocator of `device`, including kernels' temporaries."""
    if device.type == "cuda":
        return _cuda(forward, backward, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # stops the profiler from printing when it starts and stops
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
