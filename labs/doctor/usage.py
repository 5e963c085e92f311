"""What a rank's process has and uses while it trains: memory by category and its growth, threads, cores, GPU."""

from __future__ import annotations

import gc
import os
import sys
import time
from contextlib import suppress

import psutil

from labs.doctor.hooks import Hooks, describe
from labs.doctor.profile import Profile
from labs.doctor.sampling import Sampler
from labs.kit import host

FEWEST = 12  # Steps from which on growth per step is told


class Usage:
    """Of this process and its children, since it was made."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.at, self.cpu_s, self.bytes = time.perf_counter(), self._cpu_s(), self.process.memory_info().rss
        self.tensors, self.tensor_bytes = _tensors()

    def _cpu_s(self) -> float:
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.Error):  # it has gone
                total += sum(process.cpu_times()[:2])
        return total

    def cpu_share(self) -> float:
        """Cores' worth of processor time."""
        return (self._cpu_s() - self.cpu_s) / (time.perf_counter() - self.at)


def _tensors() -> tuple[int, int]:
    """How many tensors Python knows, and the bytes of their storages; what only a graph keeps is not among them."""
    torch = sys.modules["torch"]
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        with suppress(RuntimeError, NotImplementedError):  # no storage: a fake, or a wrapper
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return len(tensors), sum(storages.values())


_usage: Usage | None = None
_sampler: Sampler | None = None


def note(hooks: Hooks, profile: Profile, stage: str) -> None:
    """At the start of the steps as they are, and after them."""
    global _usage, _sampler
    if stage == "as it is":
        describe(hooks, profile)
        _usage, _sampler = Usage(), Sampler(hooks)
        _sampler.start()
        if hooks.device is not None and hooks.device.type == "cuda":
            hooks.torch.cuda.reset_peak_memory_stats(hooks.device)
            profile.memory["allocated"] = hooks.torch.cuda.memory_allocated(hooks.device)
    elif profile.step_s and "peak" not in profile.memory:
        _sampler.stop(profile)
        _memory(hooks, profile)
        _machine(hooks, profile)
        if profile.loader:
            waits = sorted(profile.spans_s.get("data", [0.0]))
            profile.loader.wait_ms = 1e3 * waits[len(waits) // 2]
        looks_s = (_sampler.took_s + profile.cost.get("looks_s", 0.0)) / len(profile.step_s)
        profile.cost["s"] = profile.cost["calls"] * profile.cost["call_s"] + looks_s


def each_step(hooks: Hooks, profile: Profile) -> None:
    """After each step as it is."""
    begun = time.thread_time()
    profile.memory.setdefault("each_step", []).append(in_use(hooks))
    profile.cost["looks_s"] = profile.cost.get("looks_s", 0.0) + time.thread_time() - begun


def each_round(hooks: Hooks, profile: Profile) -> None:
    """After the turn of steps as they are, when nothing is kept for a counterfactual."""
    profile.memory.setdefault("each_round", []).append([profile.steps, in_use(hooks)])


def in_use(hooks: Hooks) -> int:
    """Bytes of tensors on a GPU, or of this process."""
    if hooks.device is not None and hooks.device.type == "cuda":
        return hooks.torch.cuda.memory_allocated(hooks.device)
    return psutil.Process().memory_info().rss


def _memory(hooks: Hooks, profile: Profile) -> None:
    parameters = {id(p): p for root in hooks.roots.values() for p in root.parameters()}.values()
    states = [
        t
        for o in hooks.optimizers.values()
        for s in o.state.values()
        for t in s.values()
        if isinstance(t, hooks.torch.Tensor)
    ]
    profile.memory["free"] = _free(hooks)
    profile.memory |= {
        "parameters": sum(_bytes(p) for p in parameters),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, states)),
    }
    cuda = hooks.torch.cuda
    on_gpu = hooks.device is not None and hooks.device.type == "cuda"
    if on_gpu:
        profile.memory["peak"] = cuda.max_memory_allocated(hooks.device)
        now, before = cuda.memory_allocated(hooks.device), profile.memory.pop("allocated")
    else:
        now, before = _usage.process.memory_info().rss, _usage.bytes
        profile.memory["peak"] = now
    if len(profile.step_s) >= FEWEST:
        profile.memory["growth"] = (now - before) / len(profile.step_s)
        tensors, tensor_bytes = _tensors()
        profile.memory["tensors_growth"] = (tensors - _usage.tensors) / len(profile.step_s)
        profile.memory["tensor_bytes_growth"] = (tensor_bytes - _usage.tensor_bytes) / len(profile.step_s)


def _free(hooks: Hooks) -> int:
    if hooks.device is not None and hooks.device.type == "cuda":
        return hooks.torch.cuda.mem_get_info(hooks.device)[0]
    return host.container().memory_available_bytes


def _bytes(tensor: object) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of FSDP2, this rank's part
    return local.numel() * local.element_size()


def _machine(hooks: Hooks, profile: Profile) -> None:
    profile.machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": hooks.torch.get_num_threads(),
        "cpu_share": _usage.cpu_share(),
    }
