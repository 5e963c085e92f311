"""What only a GPU can show of its memory: real fragmentation, real retries, who sees which bytes, cuDNN's workspace.

Written with care and never run by this course's own tests, which have no GPU; `cuda` is torch.cuda, or a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from labs.kit import measure, nvml
from labs.parts import models
from labs.parts.remedies import leaks
from labs.parts.remedies.requests import slivers
from labs.parts.remedies.ways_to_allocate import BETWEEN, EACH, EXPANDABLE, LATE, PATTERN_WAYS, PLAIN

PAGE_BYTES = 20 * 2**20
"""Expandable segments grow by so much; with a limit torch refuses a request that fits in the pages it has already, if a
page more would not be left. Too little for another large tensor in a segment of its own."""
COUNTED = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


def views(device: torch.device, cuda: Any = torch.cuda, gpus: Callable = nvml.gpus) -> dict[str, int]:
    """Bytes in use on the device, by who is asked.

    memory_summary tells the first two, for this process and this device. "device" is what the driver has handed out to
    all processes, contexts and kernels' code among it; "nvml" the same without asking CUDA, where it may be read.
    """
    stats = cuda.memory_stats(device)
    free, total = cuda.mem_get_info(device)
    found = {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "device": total - free,
    }
    uuid = str(cuda.get_device_properties(device).uuid)
    used = [g.memory_used_bytes for g in gpus() if g.uuid and g.uuid.removeprefix("GPU-") == uuid]
    if used and used[0] is not None:
        found["nvml"] = used[0]
    return found


def fraction_for(budget_bytes: int, reserved_bytes: int, total_bytes: int) -> float:
    """Of the device's memory, so that `budget_bytes` more than `reserved_bytes` may be taken, or ValueError."""
    fraction = (budget_bytes + reserved_bytes) / total_bytes
    if not 0 < fraction <= 1:
        raise ValueError(f"a budget of {budget_bytes} bytes is more than this device has left")
    return fraction


def _allocator_settings(text: str) -> None:
    """As PYTORCH_ALLOC_CONF, but now. Both names are private: torch 2.13 deprecates the second, 2.9 has no other."""
    of_any_device = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (of_any_device or torch.cuda.memory._set_allocator_settings)(text)


@contextmanager
def limited(
    budget_bytes: int,
    device: torch.device,
    expandable: bool = False,
    cuda: Any = torch.cuda,
    set_up: Callable[[str], object] = _allocator_settings,
) -> Iterator[None]:
    """Let the allocator take only so much more, as on a smaller card; everything is put back afterwards."""
    cuda.empty_cache()
    total = cuda.mem_get_info(device)[1]
    cuda.set_per_process_memory_fraction(fraction_for(budget_bytes, cuda.memory_reserved(device), total), device)
    set_up(f"expandable_segments:{expandable}")
    try:
        yield
    finally:
        set_up("expandable_segments:False")
        cuda.empty_cache()
        cuda.set_per_process_memory_fraction(1.0, device)


@dataclass(frozen=True)
class Counted:
    """What the allocator's counters say of a piece of work."""

    changes: dict[str, int]
    """Of COUNTED, during it."""
    reserved_bytes: int
    fits: bool


def counted(work: Callable[[], object], device: torch.device, cuda: Any = torch.cuda) -> Counted:
    """Do `work`, which may run out of memory."""
    before = cuda.memory_stats(device)
    try:
        work()
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    after = cuda.memory_stats(device)
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in COUNTED}
    return Counted(changes, after.get("reserved_bytes.all.current", 0), fits)


def fragment(way: str, count: int, large_bytes: int, small_bytes: int, device: torch.device) -> Counted:
    """The pattern that ways_to_allocate.fragment simulates, for real, in as much memory as it needs."""
    parts = slivers(count, large_bytes, small_bytes)

    def work() -> None:
        held: dict[int, torch.Tensor] = {}
        for i, requests in enumerate(parts):
            for number, size in requests:
                if size:
                    held[number] = torch.empty(size, dtype=torch.uint8, device=device)
                else:
                    del held[number]
            if (i, way) in ((0, BETWEEN), (1, LATE)):
                torch.cuda.empty_cache()

    with limited(count * large_bytes + PAGE_BYTES, device, way == EXPANDABLE):
        return counted(work, device)


def _convolutions(device: torch.device) -> nn.Module:
    layers = [nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(4)]
    return nn.Sequential(*layers).to(device)


def _step(module: nn.Module, x: torch.Tensor) -> None:
    module(x).square().mean().backward()
    module.zero_grad()


def benchmark_peaks(benchmark: bool, steps: int, device: torch.device) -> list[int]:
    """Peak bytes of each of the first `steps` steps of convolutions, with cudnn.benchmark on or off."""
    module, x, found = _convolutions(device), torch.randn(16, 3, 96, 96, device=device), []
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark):
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats(device)
            _step(module, x)
            found.append(torch.cuda.max_memory_allocated(device))
    return found


def near_the_limit(headroom: float, steps: int, device: torch.device) -> tuple[Counted, list[float]]:
    """Steps with changing batches in `headroom` times the memory of the largest: (counters, seconds per step)."""
    module, seconds = _convolutions(device), []
    batches = [torch.randn(64 - 7 * (i % 5), 3, 96, 96, device=device) for i in range(steps)]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _step(module, batches[0])
    needed = torch.cuda.max_memory_allocated(device) - before

    def work() -> None:
        for x in batches:
            seconds.extend(measure.time_steps(lambda x=x: _step(module, x), 1, device))

    with limited(int(headroom * needed), device):
        return counted(work, device), seconds


def found_by_history(device: torch.device) -> tuple[str, int]:
    """The line that the allocator's own history blames for the loop `validation` of labs.parts.remedies.leaks."""
    job = leaks.job(models.make("char_gpt"), [8] * 4, device)
    torch.cuda.memory._record_memory_history()
    try:
        running = leaks.validation(job)
        for _ in job.batches:
            next(running)
        return largest_line(torch.cuda.memory._snapshot(), leaks.__file__)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


Found = tuple[str, str, Any, dict[str, Any]]  # metric, unit, samples, case


def all_parts(device: torch.device, pattern: tuple[int, int, int], rounds: int) -> Iterator[Found]:
    """All of the above, to be recorded. What runs out of memory has no seconds."""
    for who, size in views(device).items():
        yield "in_use_bytes", "B", size, {"seen_by": who}
    for way in PATTERN_WAYS:
        yield from _found(fragment(way, *pattern, device), {"way": way})
    for benchmark in (False, True):
        peaks = benchmark_peaks(benchmark, 6, device)
        yield "peak_bytes", "B", peaks, {"cudnn_benchmark": benchmark}
    for headroom in (1.02, 1.1, 1.3, 2.0):
        found, seconds = near_the_limit(headroom, 20, device)
        yield from _found(found, {"headroom": headroom})
        if seconds:
            yield "step_s", "s", seconds, {"headroom": headroom}
    module, x = _convolutions(device), torch.randn(16, 3, 96, 96, device=device)
    ways = {PLAIN: lambda: _step(module, x), EACH: lambda: (_step(module, x), torch.cuda.empty_cache())}
    for way, samples in measure.interleave(ways, rounds, device, inner=5).items():
        yield "step_s", "s", samples, {"way": way}
    line, size = found_by_history(device)
    yield "leaked_bytes", "B", size, {"line": line}


def _found(found: Counted, case: dict[str, Any]) -> Iterator[Found]:
    yield "fits", "1", float(found.fits), case
    yield "reserved_bytes", "B", found.reserved_bytes, case
    for name, change in found.changes.items():
        yield name, "calls", change, case


def largest_line(snapshot: dict, root: str) -> tuple[str, int]:
    """("file:line", bytes) that most live bytes of a memory snapshot come from, among files below folder `root`.

    `snapshot` is torch.cuda.memory._snapshot() after _record_memory_history(). ("", 0) if no block has such a line.
    """
    by_line: dict[str, int] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            own = [f for f in block.get("frames", ()) if f["filename"].startswith(root)]
            if own:
                line = f"{own[-1]['filename'].rsplit('/', 1)[-1]}:{own[-1]['line']}"
                by_line[line] = by_line.get(line, 0) + block["size"]
    return max(by_line.items(), key=lambda item: item[1], default=("", 0))
