"""Measure what a rank's process uses while it trains: memory and its growth, threads, time in the script's own lines.

A thread samples the main thread's line in "prepare" and "rest"; the hooks time the calls of torch. A line's time is its
share of the samples, times the time measured for these kinds. A line that runs a model that the hooks don't see, such
as a frozen teacher or model.forward(x), doesn't count as the script's own work.
"""

from __future__ import annotations

import functools
import gc
import linecache
import mmap
import os
import random
import sys
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
import torch

from labs.doctor.hooks import Hooks, describe
from labs.doctor.probes.scene import callers
from labs.doctor.profile import Line, Profile
from labs.kit import host

PERIOD_S, LOOKS, SELDOM = 0.005, 4, 0.1
"""Mean time between samples, at random so that it can't match the steps. A wake-up takes about 0.1 ms and the GIL: so a
step gets at most LOOKS. While own lines take less than SELDOM, too little to report, only one in ten steps gets one."""
FEWEST = 6  # Samples of a line that it takes to report it


class Usage(threading.Thread):
    """Sample this process, from the first unchanged step to the last."""

    def __init__(self, hooks: Hooks, profile: Profile) -> None:
        """Sampling starts with the `with` block, which first describes the training."""
        super().__init__(name="doctor", daemon=True)
        self.hooks, self.profile, self.ended = hooks, profile, threading.Event()
        self.seen: Counter[tuple[str, str, int]] = Counter()  # By kind, file and line

    def __enter__(self) -> None:
        describe(self.hooks, self.profile)
        self.tensors = _tensors(self.hooks)
        self.start()

    def run(self) -> None:
        """Sample until `ended` is set."""
        draw = random.Random(0)
        while not self.ended.wait(draw.uniform(0.5, 1.5) * self._period_s()):
            self._look()

    def _period_s(self) -> float:
        spans, steps = self.profile.spans_s, self.profile.step_s[-10:]
        own_s = sum(sum(spans.get(kind, [])[-10:]) for kind in ("prepare", "rest"))
        step_s = sum(steps) / max(1, len(steps))
        return max(PERIOD_S, step_s / LOOKS) if own_s >= SELDOM * sum(steps) else 10 * step_s

    def _look(self) -> None:
        hooks = self.hooks
        kind, frame = hooks.spans.stack[-1], sys._current_frames().get(hooks.spans.thread)
        if kind not in ("prepare", "rest") or frame is None:
            return
        if kind == "rest" and not hooks.backwards:
            kind = "loss"  # after a forward, before the first backward
        elif kind == "prepare" and any(f.f_code in hooks.forwards for f in callers(frame)):
            kind = "model"
        self.seen[kind, *hooks.own_line(frame)] += 1

    def __exit__(self, *error: Any) -> None:
        """Write what was seen into the profile."""
        self.ended.set()
        self.join()
        profile, hooks, steps = self.profile, self.hooks, max(1, len(self.profile.step_s))
        lines = profile.lines = hooks.noted_lines(steps)
        for part, kinds in (("prepare", ("model", "prepare")), ("rest", ("loss", "rest"))):
            looks = sum(n for key, n in self.seen.items() if key[0] in kinds)
            per_look = 1e3 * sum(profile.spans_s.get(part, [])) / steps / max(1, looks)
            lines += [
                Line(kind, "", file, line, linecache.getline(file, line).strip(), 0.0, n * per_look)
                for (kind, file, line), n in self.seen.items()
                if kind in kinds and n >= FEWEST
            ]
        lines.sort(key=lambda line: -line.ms)
        profile.memory["free"] = free_bytes(hooks)
        if not hooks.on_gpu:
            grown = [(now - before) / steps for now, before in zip(_tensors(hooks), self.tensors, strict=True)]
            profile.memory |= dict(zip(("tensors_growth", "tensor_bytes_growth"), grown, strict=True))
        profile.machine = {"cores": host.core_count(), "threads": torch.get_num_threads()}


def free_bytes(hooks: Hooks) -> int:
    """Return the free memory of the GPU, or of the host within the limit of this process's control group."""
    return torch.cuda.mem_get_info(hooks.device)[0] if hooks.on_gpu else host.container().memory_available_bytes


def note_memory(hooks: Hooks, profile: Profile) -> None:
    """Record the memory in use, after an unchanged step or a turn of them, when there is no snapshot."""
    in_use = torch.cuda.memory_allocated(hooks.device) if hooks.on_gpu else _resident()
    profile.memory.setdefault("series", []).append([profile.steps, in_use])


@functools.cache
def _statm() -> int:
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _resident() -> int:
    """Return this process's bytes in memory; on Linux in a tenth of psutil's time, as each step needs it."""
    if not psutil.LINUX:
        return psutil.Process().memory_info().rss
    return int(os.pread(_statm(), 99, 0).split()[1]) * mmap.PAGESIZE


def _tensors(hooks: Hooks) -> tuple[int, int]:
    """Return how many tensors Python knows, and their storages' bytes, without those that only a graph keeps."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # no storage: a fake, or a wrapper
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return len(tensors), sum(storages.values())
