"""What a rank's process has and uses while it trains: memory by category and its growth, threads, cores, GPU."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import threading
import time
from contextlib import suppress

import psutil

from labs.doctor.facts import Facts
from labs.doctor.hooks import Hooks, describe
from labs.doctor.sampling import Sampler
from labs.kit import host

FEWEST = 12
"""Steps from which on growth per step is told."""
LOOK_S, FEWEST_LOOKS = 0.2, 5
"""Between looks at the GPU; so many of them tell how busy it is."""
NO_NVML = "how busy the GPU is, and the power that it takes: pip install nvidia-ml-py"


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


class GpuLooks(threading.Thread):
    """At how busy the GPU is, while the training uses it as without the doctor. NVML's answer is of the time before."""

    def __init__(self, hooks: Hooks, facts: Facts) -> None:
        super().__init__(name="doctor's looks at the GPU", daemon=True)
        self.hooks, self.facts, self.ended = hooks, facts, threading.Event()
        self.seen: list[tuple[float, float]] = []

    def run(self) -> None:
        """Until the event is set, or NVML is not there or says no: then it is not told."""
        try:
            while not self.ended.wait(LOOK_S):
                if self.hooks.undisturbed:
                    self.look()
        except ModuleNotFoundError as e:  # torch asks by way of nvidia-ml-py, or of AMD's amdsmi
            if "nvidia-ml-py" in str(e):
                self.facts.unseen.append(NO_NVML)
        except Exception:
            pass

    def look(self) -> None:
        """Once; the facts get the medians as soon as there are enough of them."""
        cuda, device = self.hooks.torch.cuda, self.hooks.device
        self.seen.append((cuda.utilization(device), cuda.power_draw(device) / 1e3))
        if len(self.seen) >= FEWEST_LOOKS:
            percent, power_w = map(statistics.median, zip(*self.seen, strict=True))
            # A new dict: the main thread may be writing down the old one
            self.facts.machine = self.facts.machine | {"gpu_percent": round(percent), "power_w": power_w}


_usage: Usage | None = None
_sampler: Sampler | None = None
_gpu_looks: GpuLooks | None = None


def note(hooks: Hooks, facts: Facts, stage: str) -> None:
    """At the start of the steps as they are, and after them."""
    global _usage, _sampler, _gpu_looks
    if stage == "as it is":
        describe(hooks, facts)
        _usage, _sampler = Usage(), Sampler(hooks)
        _sampler.start()
        if hooks.device is not None and hooks.device.type == "cuda":
            hooks.torch.cuda.reset_peak_memory_stats(hooks.device)
            facts.memory["allocated"] = hooks.torch.cuda.memory_allocated(hooks.device)
    elif facts.step_s and "peak" not in facts.memory:
        _sampler.stop(facts)
        _memory(hooks, facts)
        _machine(hooks, facts)
        if facts.loader:
            waits = sorted(facts.spans_s.get("data", [0.0]))
            facts.loader.wait_ms = 1e3 * waits[len(waits) // 2]
        looks_s = (_sampler.took_s + facts.cost.get("looks_s", 0.0)) / len(facts.step_s)
        facts.cost["s"] = facts.cost["calls"] * facts.cost["call_s"] + looks_s
        if facts.device == "cuda":
            _gpu_looks = GpuLooks(hooks, facts)
            _gpu_looks.start()
    elif _gpu_looks is not None:
        _gpu_looks.ended.set()


def each_step(hooks: Hooks, facts: Facts) -> None:
    """After each step as it is."""
    begun = time.thread_time()
    facts.memory.setdefault("each_step", []).append(in_use(hooks))
    facts.cost["looks_s"] = facts.cost.get("looks_s", 0.0) + time.thread_time() - begun


def each_round(hooks: Hooks, facts: Facts) -> None:
    """After the turn of steps as they are, when nothing is kept for a counterfactual."""
    facts.memory.setdefault("each_round", []).append([facts.steps, in_use(hooks)])


def in_use(hooks: Hooks) -> int:
    """Bytes of tensors on a GPU, or of this process."""
    if hooks.device is not None and hooks.device.type == "cuda":
        return hooks.torch.cuda.memory_allocated(hooks.device)
    return psutil.Process().memory_info().rss


def _memory(hooks: Hooks, facts: Facts) -> None:
    parameters = {id(p): p for root in hooks.roots.values() for p in root.parameters()}.values()
    states = [
        t
        for o in hooks.optimizers.values()
        for s in o.state.values()
        for t in s.values()
        if isinstance(t, hooks.torch.Tensor)
    ]
    facts.memory["free"] = _free(hooks)
    facts.memory |= {
        "parameters": sum(_bytes(p) for p in parameters),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, states)),
    }
    cuda = hooks.torch.cuda
    on_gpu = hooks.device is not None and hooks.device.type == "cuda"
    if on_gpu:
        facts.memory["peak"] = cuda.max_memory_allocated(hooks.device)
        now, before = cuda.memory_allocated(hooks.device), facts.memory.pop("allocated")
    else:
        now, before = _usage.process.memory_info().rss, _usage.bytes
        facts.memory["peak"] = now
    if len(facts.step_s) >= FEWEST:
        facts.memory["growth"] = (now - before) / len(facts.step_s)
        tensors, tensor_bytes = _tensors()
        facts.memory["tensors_growth"] = (tensors - _usage.tensors) / len(facts.step_s)
        facts.memory["tensor_bytes_growth"] = (tensor_bytes - _usage.tensor_bytes) / len(facts.step_s)


def _free(hooks: Hooks) -> int:
    if hooks.device is not None and hooks.device.type == "cuda":
        return hooks.torch.cuda.mem_get_info(hooks.device)[0]
    return host.container().memory_available_bytes


def _bytes(tensor: object) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of FSDP2, this rank's part
    return local.numel() * local.element_size()


def _machine(hooks: Hooks, facts: Facts) -> None:
    facts.machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": hooks.torch.get_num_threads(),
        "cpu_share": _usage.cpu_share(),
    }
