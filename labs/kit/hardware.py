"""The devices that ranks run on, and this machine's GPUs, cores, torch build and datasheets.

Nothing in this module initialises CUDA, because a notebook kernel that has done so can't start ranks safely. A card
missing from `gpus.toml`, or a figure without a source there, is None, so no share of a peak is computed from a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.kit import _compat, nvml
from labs.kit.errors import BadInput, did_you_mean, require
from labs.kit.host import affinity, core_count, cores
from labs.kit.nvml import Visible, visible

KINDS = ("auto", "cpu", "cuda", "cuda-shared")


@dataclass(frozen=True)
class Device:
    """The device of one rank: a GPU by its CUDA index, or CPU cores."""

    kind: str
    """"cuda", "cpu", or "cuda-shared": a GPU that several ranks share, so NCCL can't be used."""
    index: int
    name: str
    cores: tuple[int, ...] = ()
    """CPU cores to pin to; empty for a GPU."""


def devices(
    n: int, *, kind: str = "auto", gpu_names: Sequence[str] | None = None, cores: Sequence[int] | None = None
) -> list[Device]:
    """Return a device for each of `n` ranks: `n` GPUs if that many are visible, otherwise `n` CPU cores.

    `kind` selects "cpu", "cuda", or "cuda-shared" (all ranks on GPU 0, gloo). Tests pass `gpu_names` and `cores` to
    replace this machine's. If there are too few, raises BadInput with the fix.
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


def place(nproc: int, kind: str = "auto", oversubscribe: bool = False) -> list[Device]:
    """Return a device for each of `nproc` ranks on this machine. If there are too few, BadInput names the fix.

    The environment variable COURSE_OVERSUBSCRIBE=1 sets `oversubscribe` for every launch, so that unchanged notebooks
    run on a machine with one core.
    """
    require(nproc >= 1, f"nproc must be at least 1, not {nproc}")
    if not (oversubscribe or os.environ.get("COURSE_OVERSUBSCRIBE") == "1"):
        return _shareable(devices(nproc, kind=kind))
    for n in range(nproc, 1, -1):
        try:
            have = devices(n, kind=kind)
        except BadInput:
            continue
        return _shareable(_repeated(have, nproc))
    return _shareable(_repeated(devices(1, kind=kind), nproc))


def _repeated(have: Sequence[Device], nproc: int) -> list[Device]:
    """Assign fewer devices to `nproc` ranks in turn. GPUs become "cuda-shared": NCCL refuses two ranks on one GPU."""
    if len(have) < nproc and have[0].kind == "cuda":
        have = [dataclasses.replace(d, kind="cuda-shared") for d in have]
    return [have[i % len(have)] for i in range(nproc)]


def _shareable(placement: list[Device]) -> list[Device]:
    """Return `placement`. Raises BadInput if ranks would share a GPU in exclusive-process mode."""
    indices = {d.index for d in placement if d.kind == "cuda-shared"}
    require_shareable(indices if len(placement) > 1 else ())
    return placement


def require_shareable(indices: Collection[int], shown: Sequence[Visible] | None = None) -> None:
    """Raise BadInput if one of the GPUs with these CUDA indices is in exclusive-process mode.

    Call it before a second process uses the GPU, where CUDA reports "all CUDA-capable devices are busy or unavailable".
    """
    shown = (visible(nvml.report(brief=True)) or () if indices else ()) if shown is None else shown
    for v in shown:
        fix = 'let its owner run `nvidia-smi -c DEFAULT`, or use device="cpu"'
        kept = v.cuda_index in indices and v.exclusive
        require(not kept, f"GPU {v.cuda_index} is in exclusive-process mode, but two processes need it: {fix}")


def why_cores(placement: Sequence[Device], kind: str = "auto", gpu_names: Sequence[str] | None = None) -> str:
    """Return one line if ranks run on cores because there are fewer GPUs than ranks; otherwise ""."""
    if kind != "auto" or placement[0].kind != "cpu":
        return ""
    gpus = len(visible_gpu_names() if gpu_names is None else gpu_names)
    if not gpus:
        return ""
    ranks = len(placement)
    return (
        f"{ranks} ranks run on CPU cores because torch sees {_count(gpus, 'GPU')} and each rank needs its own: "
        f'nproc={gpus} uses {"it" if gpus == 1 else "them"}, device="cuda-shared" lets all ranks share GPU 0'
    )


def _enough_gpus(n: int, names: Sequence[str]) -> None:
    fix = f'nproc={len(names)}, device="cuda-shared" (all on one GPU, gloo) or ' if names else ""
    fix += 'device="cpu"'
    require(len(names) >= n, f"{_count(n, 'GPU')} requested, but torch sees {len(names)}: use {fix}")


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
    """Return the logical CPUs that ranks are pinned to: the affinity, cut to what a CPU quota allows.

    One CPU of each physical core comes first, second hyper-threads last, so two ranks share a core only if they must.
    """
    return one_per_core_first(affinity(), root)[: core_count()]


def one_per_core_first(cpus: Sequence[int], root: str | Path = "/") -> tuple[int, ...]:
    """Sort `cpus` in ascending order, the first hyper-thread of every physical core before the second ones."""
    turn = {cpu: place for core in cores(cpus, root) for place, cpu in enumerate(core.cpus)}
    return tuple(sorted(turn, key=lambda cpu: (turn[cpu], cpu)))


def visible_gpu_names(report: nvml.Report | None = None, environ: dict[str, str] | None = None) -> list[str]:
    """Return the names of the GPUs that torch can use, in CUDA order; [] for a CPU build."""
    import torch

    if not torch.backends.cuda.is_built():
        return []
    found = visible(report or nvml.report(brief=True), environ)
    if found is None:  # no NVML (ROCm, some WSL): let torch count, which asks the CUDA runtime
        return [f"GPU {i}" for i in range(torch.cuda.device_count())]
    return [v.name or f"GPU {v.cuda_index}" for v in found]


@functools.cache
def cpu_name() -> str:
    """Return the processor's name, for example "AMD EPYC 9654"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


def summary() -> dict[str, Any]:
    """Return the hardware facts that go into every record's provenance."""
    import psutil

    report = nvml.report(brief=True)
    return {
        "cpu": cpu_name(),
        "cores": core_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [g.name for g in report.gpus],
        "driver": report.driver,
    }


def nccl_version() -> str | None:
    """Return the version of torch's NCCL, for example "2.28.9"; None for a build without it."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def build() -> dict[str, Any]:
    """Return what this torch was built for. `arch_list` comes from the build, so CUDA stays uninitialised."""
    import torch

    arch = _compat.cuda_arch_flags() if torch.backends.cuda.is_built() else None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        # torch.backends.cudnn.version() would ask every GPU for its capability, which starts CUDA.
        "cudnn": _compat.cudnn_version() if torch.backends.cudnn.is_available() else None,
        "nccl": nccl_version(),
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "arch_list": arch.split() if arch else [],
    }


def runs_on(capability: tuple[int, int], arch_list: Sequence[str]) -> str | None:
    """Return how kernels for `arch_list` run on a card of this compute capability: "native", "ptx" or None.

    Machine code sm_XY runs on X.Y and later minor versions of major version X. The driver compiles PTX (compute_XY) for
    any later card, so the first start is slow and newer units stay unused. Targets with an "a" (sm_90a) run on exactly
    that card. Source: CUDA C++ Programming Guide.
    """
    found = None
    for entry in arch_list:
        target, _, digits = entry.partition("_")
        if target not in ("sm", "compute"):
            continue  # ROCm uses names such as gfx90a
        exact = digits.endswith("a")
        number = int(digits.rstrip("af"))
        major, minor = divmod(number, 10)
        if target == "sm" and major == capability[0] and (minor == capability[1] if exact else minor <= capability[1]):
            return "native"
        if target == "compute" and not exact and (major, minor) <= capability:
            found = "ptx"
    return found


DTYPES = {"fp32": "fp32", "tf32": "tensor_tf32", "bf16": "tensor_bf16", "fp16": "tensor_fp16"}


@dataclass(frozen=True)
class Peak:
    """A dense peak from a datasheet, in FLOP/s, with its source."""

    flop_s: float
    gpu: str
    dtype: str
    source: str
    url: str


@dataclass(frozen=True)
class Spec:
    """One row of gpus.toml; None where no figure has a source. TFLOP/s are dense."""

    gpu: str
    names: tuple[str, ...]
    source: str
    url: str
    memory_gb: float | None = None
    usable_mib: int | None = None
    """The card's total in MiB, as nvidia-smi prints it; see `usable_bytes`."""
    usable_source: str = ""
    """Title of the source of `usable_mib`; `usable_url` is its address, "" if we have none."""
    usable_url: str = ""
    bandwidth_gb_s: float | None = None
    bus_bits: int | None = None
    pin_gbit_s: float | None = None
    fp32: float | None = None
    tensor_tf32: float | None = None
    tensor_bf16: float | None = None
    tensor_fp16: float | None = None
    halved: bool = False
    """Whether the tensor figures are half of a figure "with sparsity"."""
    link: str | None = None
    link_gb_s: float | None = None
    pcie_gb_s: float | None = None
    """For a card whose `link` is a bridge, which joins two cards; PCIe joins more."""
    l2_mib: float | None = None
    """Level-2 cache in MiB (2^20 bytes)."""
    tdp_w: float | None = None
    note: str = ""

    def tflops(self, dtype: str) -> float | None:
        """Return dense TFLOP/s of "fp32", "tf32", "bf16" or "fp16"."""
        return getattr(self, DTYPES[dtype])

    def link_among(self, gpus: int) -> float | None:
        """Return one card's 10^9 bytes/s, both directions added, among `gpus` cards; more than two have no bridge."""
        return self.pcie_gb_s if "bridge" in (self.link or "") and gpus > 2 else self.link_gb_s


@functools.cache
def specs() -> tuple[Spec, ...]:
    """Return all rows of gpus.toml, in order."""
    text = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return tuple(_spec(gpu, dict(row), text["sources"]) for gpu, row in text["gpu"].items())


def _spec(gpu: str, row: dict[str, Any], sources: dict[str, dict[str, str]]) -> Spec:
    source, usable = sources[row.pop("source")], sources.get(row.pop("usable_source", ""))
    if usable:
        row |= {"usable_source": usable["title"], "usable_url": usable["url"]}
    return Spec(gpu, tuple(row.pop("names")), source["title"], source["url"], **row)


def spec(name: str) -> Spec | None:
    """Return the row of the card with this NVML name or table name; None if there is none.

    Names must match in full: "NVIDIA H200 NVL" and "NVIDIA H200" are different products.
    """
    wanted = name.strip().casefold()
    return next((s for s in specs() if wanted in (n.casefold() for n in (s.gpu, *s.names))), None)


def require_spec(name: str, otherwise: str = "") -> Spec:
    """Return the row of `name`. If there is none, BadInput lists the nearest and known names, and `otherwise`."""
    row = spec(name)
    if row is None:  # search for the nearest name only now, because that is slow
        known = [s.gpu for s in specs()]
        hint = did_you_mean(name, known)
        raise BadInput(f"no datasheet of {name!r} here. {hint}Known: {', '.join(known)}{otherwise}")
    return row


def usable_bytes(name: str) -> int | None:
    """Return a card's total memory in bytes as nvidia-smi prints it: the upper limit for a model.

    It differs from the datasheet's 10^9 bytes: an "80 GB" A100 has 85.9e9, a "24 GB" RTX 4090 has 25.8e9. The driver
    and each process's CUDA context use part of it. None for a card without a sourced figure. On the machine itself, ask
    `nvml.gpus()`.
    """
    row = spec(name)
    return row.usable_mib * 2**20 if row and row.usable_mib else None


def peak(name: str, dtype: str) -> Peak | None:
    """Return a card's dense peak for "fp32", "tf32", "bf16" or "fp16"; None if unknown."""
    row = spec(name)
    tflops = row.tflops(dtype) if row else None
    return Peak(tflops * 1e12, row.gpu, dtype, row.source, row.url) if row and tflops else None
