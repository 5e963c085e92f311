"""Which devices ranks run on, and what is here: GPUs, cores, container limits, torch's build.

Nothing in this module initialises CUDA: a notebook kernel that did could not start ranks safely any more.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit import nvml, topology
from labs.kit.build import build, nccl_version
from labs.kit.cli import BadInput, require
from labs.kit.container import Container, affinity, container, core_count
from labs.kit.nvml import Gpu, gpus
from labs.kit.peaks import Peak, peak
from labs.kit.visible import Visible, visible

__all__ = ["Container", "Device", "Gpu", "Peak", "Visible", "container", "core_count", "devices", "gpus",
           "inventory", "nccl_version", "peak", "summary", "visible"]  # fmt: skip

KINDS = ("auto", "cpu", "cuda", "cuda-shared")


@dataclass(frozen=True)
class Device:
    """Where one rank runs: a GPU by its CUDA index, or CPU cores."""

    kind: str
    """"cuda", "cpu", or "cuda-shared": a GPU that other ranks use too, so that NCCL cannot be used."""
    index: int
    name: str
    cores: tuple[int, ...] = ()
    """CPU cores to pin to; empty for a GPU."""


def devices(
    n: int, *, kind: str = "auto", gpu_names: Sequence[str] | None = None, cores: Sequence[int] | None = None
) -> list[Device]:
    """A device for each of `n` ranks: `n` GPUs if so many are visible, otherwise `n` CPU cores, one each.

    `kind` asks for one of them: "cpu", "cuda", or "cuda-shared" (all ranks on GPU 0, gloo). `gpu_names` and
    `cores` stand in for this machine in tests. Raises BadInput with the fix if there are too few.
    """
    require(n >= 1, f"at least 1 device is needed, not {n}")
    require(kind in KINDS, f"device must be one of {', '.join(KINDS)}, not {kind!r}")
    names = visible_gpu_names() if gpu_names is None and kind != "cpu" else list(gpu_names or ())
    if kind == "cuda-shared":
        require(bool(names), 'device="cuda-shared" needs a GPU and torch sees none: use device="cpu"')
        return [Device("cuda-shared", 0, names[0])] * n
    if kind == "cuda" or (kind == "auto" and len(names) >= n):
        _enough_gpus(n, names)
        return [Device("cuda", i, name) for i, name in enumerate(names[:n])]
    return _cpu_devices(n, usable_affinity() if cores is None else tuple(cores), len(names))


def _enough_gpus(n: int, names: Sequence[str]) -> None:
    fix = f'nproc={len(names)}, device="cuda-shared" (all on one GPU, gloo) or ' if names else ""
    fix += 'device="cpu"'
    require(len(names) >= n, f"{_count(n, 'GPU')} asked for and torch sees {len(names)}: use {fix}")


def _cpu_devices(n: int, cores: tuple[int, ...], n_gpus: int) -> list[Device]:
    if n > len(cores):
        have = _count(len(cores), "usable core") + (f" and {_count(n_gpus, 'GPU')}" if n_gpus else "")
        raise BadInput(
            f"{n} ranks need {n} devices and this machine has {have}: use nproc={max(len(cores), n_gpus)}, "
            "or oversubscribe=True to share them (right results, useless timings)"
        )
    return [Device("cpu", i, cpu_name(), (core,)) for i, core in enumerate(cores[:n])]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def usable_affinity(root: str | Path = "/") -> tuple[int, ...]:
    """The logical CPUs that ranks are pinned to: the affinity, cut to what a CPU quota keeps running.

    One of each physical core comes first, the other hyper-threads last: two ranks share a core only when they must.
    """
    return one_per_core_first(affinity(), root)[: core_count()]


def one_per_core_first(cpus: Sequence[int], root: str | Path = "/") -> tuple[int, ...]:
    """`cpus` in ascending order, but first the first hyper-thread of every physical core, then the second ones."""
    turn = {cpu: place for core in topology.cores(cpus, root) for place, cpu in enumerate(core.cpus)}
    return tuple(sorted(turn, key=lambda cpu: (turn[cpu], cpu)))


def visible_gpu_names(report: nvml.Report | None = None, environ: dict[str, str] | None = None) -> list[str]:
    """Names of the GPUs that this torch could use, in CUDA order; [] for a CPU build."""
    import torch

    if not torch.backends.cuda.is_built():
        return []
    found = visible(report or nvml.report(), environ)
    if found is None:  # no NVML (ROCm, some WSL): torch counts, at the price of asking the CUDA runtime
        return [f"GPU {i}" for i in range(torch.cuda.device_count())]
    return [v.name or f"GPU {v.cuda_index}" for v in found]


@functools.cache
def cpu_name() -> str:
    """The processor's name, for example "AMD EPYC 9654"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


def inventory(nvml_module: Any = None, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """Everything known about this machine without starting CUDA, as plain JSON values."""
    report = nvml.report(nvml_module)
    found = visible(report, environ)
    environ = os.environ if environ is None else environ
    return {
        "cpu": cpu_name(),
        "driver": report.driver,
        "cuda_driver": list(report.cuda_driver) if report.cuda_driver else None,
        "nvml_problem": report.problem,
        "gpus": [dataclasses.asdict(g) for g in report.gpus],
        "topology": [list(row) for row in report.topology],
        "visible": None if found is None else [dataclasses.asdict(v) for v in found],
        "CUDA_VISIBLE_DEVICES": environ.get("CUDA_VISIBLE_DEVICES"),
        "container": dataclasses.asdict(container()),
        "build": build(),
    }


def summary() -> dict[str, Any]:
    """The few facts about the hardware that go into every record's provenance."""
    import psutil

    report = nvml.report()
    return {
        "cpu": cpu_name(),
        "cores": core_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [g.name for g in report.gpus],
        "driver": report.driver,
    }
