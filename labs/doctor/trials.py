"""What cannot be changed within a script's loop: how fast its DataLoader is alone, with other numbers of workers.

Alone, workers have all cores for themselves: beside a step that computes on these cores they give less.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from labs.doctor.hooks import Hooks, length
from labs.doctor.profile import Gone, Profile
from labs.kit import _compat, host

MOST_ROUNDS = 6
MEASURED_S = 0.15  # Time of one turn, without its start
WORTH = 0.02  # Share of a step that must be a wait for data
COPIES = 12  # Of a batch to a GPU, in turn


class OtherLoaders:
    """The training's DataLoader alone, with 0, 1, 2, 4 ... workers in turn, up to one for each core of the rank."""

    name, on_request, needs_restore = "other loaders", False, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        from torch.utils.data import IterableDataset

        loader = hooks.loader
        if loader is None:
            return "its data comes from no DataLoader"
        if isinstance(loader.dataset, IterableDataset):
            return "its dataset gives samples in its own order: it cannot be asked for them a second time"
        order = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        if iter(order) is order:
            return "its sampler can be used once only"
        if statistics.fmean(profile.spans_s["data"]) < WORTH * statistics.fmean(profile.step_s):
            return "it hardly waits for data"
        if profile.loader is not None and profile.loader.by_batch_ms is not None:
            return "its rows are in memory: one index makes a batch"
        if not loader.num_workers and multiprocessing.get_start_method() != "fork":
            return "workers would import the script anew"
        return ""

    def measure(self, hooks: Hooks, profile: Profile, seconds: float) -> None:
        """Into `loader_s`: s per batch, one in each round."""
        ends = time.perf_counter() + seconds
        cores = max(1, host.core_count() // profile.local_ranks)
        counts = sorted({0, hooks.loader.num_workers, *(1 << n for n in range(cores.bit_length()))})
        for done in range(MOST_ROUNDS):
            found = {}
            for workers in counts:
                begun = time.perf_counter()
                found[workers] = seconds_per_batch(hooks.loader, workers, MEASURED_S)
                took = time.perf_counter() - begun
                if time.perf_counter() + 2 * took > ends:
                    break
            if done and len(found) < len(counts):
                return  # rounds stay whole
            for workers, s in found.items():
                profile.loader_s.setdefault(str(workers), []).append(s)
            if time.perf_counter() > ends:
                return
            counts = list(found)


class _Endless:
    """A sampler, again and again."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.order


def seconds_per_batch(loader: Any, workers: int, seconds: float) -> float:
    """Of a new DataLoader of the same data and order, taken from as fast as it can, after its workers' start."""
    from torch.utils.data import DataLoader

    batches = loader.batch_sampler is not None
    order = _Endless(loader.batch_sampler if batches else loader.sampler)
    prefetch = (loader.prefetch_factor or 2) if workers else None
    alone = DataLoader(
        loader.dataset,
        **({"batch_sampler": order} if batches else {"sampler": order, "batch_size": None}),
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=prefetch,
        timeout=30 if workers else 0,
        multiprocessing_context=loader.multiprocessing_context if workers and loader.num_workers else None,
    )
    iterator = iter(alone)
    try:
        for _ in islice(iterator, workers * (prefetch or 0) + 1):
            pass  # those that were made while the first one was waited for
        begun, taken = time.perf_counter(), 0
        # Workers give in bursts: whole rounds of all of them
        while taken < max(2, workers) or time.perf_counter() - begun < seconds or (workers and taken % workers):
            next(iterator)
            taken += 1
        return (time.perf_counter() - begun) / taken
    finally:
        _compat.end_workers(iterator)


class PinnedMemory:
    """A batch copied to the GPU from pageable and from pinned memory, in turn."""

    name, on_request, needs_restore = "pinned memory", False, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if profile.device != "cuda":
            return "it is for copies to a GPU"
        if hooks.loader is None:
            return "its data comes from no DataLoader"
        if not length(hooks.last_batch(), hooks.torch.Tensor):
            return "its batches are not understood"
        tensors = _on_host(hooks)
        if not tensors:
            return Gone("its batches are on the GPU")
        return Gone("they are pinned") if all(t.is_pinned() for t in tensors) else ""

    def measure(self, hooks: Hooks, profile: Profile, seconds: float) -> None:
        """Into `copy_s`: s per batch, up to the end of the copy."""
        torch, ends = hooks.torch, time.perf_counter() + seconds
        pageable = _on_host(hooks)
        pinned = [t.pin_memory() for t in pageable]
        for _ in range(COPIES):
            for name, tensors in (("pageable", pageable), ("pinned", pinned)):
                torch.cuda.synchronize(hooks.device)
                begun = time.perf_counter()
                for tensor in tensors:
                    tensor.to(hooks.device, non_blocking=True)
                torch.cuda.synchronize(hooks.device)
                profile.copy_s.setdefault(name, []).append(time.perf_counter() - begun)
            if time.perf_counter() > ends:
                return


def _on_host(hooks: Hooks) -> list[Any]:
    leaves = _compat.tree_leaves(hooks.last_batch())
    return [t for t in leaves if isinstance(t, hooks.torch.Tensor) and t.device.type == "cpu"]
