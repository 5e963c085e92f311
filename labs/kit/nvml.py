"""Read the NVIDIA GPUs of this machine from NVML, the driver's library, and find out which of them CUDA shows.

This doesn't initialise CUDA, so a notebook kernel may do it. Any query can be unsupported (consumer cards, vGPU, WSL,
old drivers). Its field is then None, never a crash or a guess.

NVML counts in PCI bus order and ignores CUDA_VISIBLE_DEVICES. CUDA renumbers the visible GPUs from 0 and, unless
CUDA_DEVICE_ORDER=PCI_BUS_ID, puts the fastest first. The UUID is the same in both.
Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "Device Enumeration".
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons).
THROTTLE_BITS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock setting",
}  # fmt: skip  0x1 is "idle", which isn't throttling

# nvmlComputeMode: how many processes can use the card at a time.
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}

PROBLEMS = {
    9: ("the NVIDIA driver is not loaded", "load it (modprobe nvidia) or reboot"),
    12: (
        "no NVIDIA driver library (libnvidia-ml.so) was found",
        "with a GPU: install the driver; in a container: start it with --gpus all",
    ),
    4: ("NVML may not be read by this user", "give the user access to /dev/nvidia*"),
    18: (
        "the driver's kernel module and its library have different versions",
        "the driver was upgraded while loaded: reboot, or reload the module",
    ),
    15: ("a GPU has fallen off the bus", "reboot; if it comes back, check power and seating"),
}  # keys are NVML_ERROR_* codes


@dataclass(frozen=True)
class Process:
    """A process that holds memory on a GPU. Inside a container, other pids can be hidden or renumbered."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver sees it. `index` is NVML's (PCI bus order), which can differ from CUDA's."""

    index: int
    name: str | None = None
    uuid: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    temperature_c: int | None = None
    mig: bool | None = None
    mig_uuids: tuple[str, ...] = ()
    mig_memory_bytes: tuple[int | None, ...] = ()
    """Memory of each MIG instance, in the order of `mig_uuids`: all that a process gets."""
    compute_mode: str | None = None
    """A value of COMPUTE_MODES. In "exclusive process", a second process that starts CUDA on the card fails."""
    throttle: tuple[str, ...] | None = None
    processes: tuple[Process, ...] | None = None


@dataclass(frozen=True)
class Report:
    """Everything NVML reported. If it couldn't be read, `problem` and `remedy` say why."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    """Newest CUDA version this driver can run, as (major, minor)."""
    problem: str | None = None
    remedy: str | None = None


def ask(nvml: Any, function: str, *args: Any) -> Any:
    """Return `nvml.function(*args)`, or None if this card, driver or binding doesn't support it."""
    try:
        answer = getattr(nvml, function)(*args)
    except (AttributeError, UnicodeDecodeError, nvml.NVMLError):
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def library(nvml: Any = None) -> Any:
    """Return `nvml`, or the pynvml module. ImportError if nvidia-ml-py isn't installed."""
    if nvml is None:
        import pynvml as nvml
    return nvml


@contextmanager
def session(nvml: Any = None) -> Iterator[Any]:
    """Initialise NVML for the block. Raises NVMLError or ImportError if that fails."""
    nvml = library(nvml)
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def report(nvml: Any = None, *, brief: bool = False) -> Report:
    """Read everything; with `brief`, only what identifies the cards (some 7 queries each), as every launch needs it.

    Tests pass `nvml` to replace the pynvml module.
    """
    try:
        nvml = library(nvml)
    except ImportError:
        return Report(problem="the Python package nvidia-ml-py is missing", remedy="pip install nvidia-ml-py")
    try:
        with session(nvml):
            return _read(nvml, brief)
    except nvml.NVMLError as e:
        code = getattr(e, "value", None)
        problem, remedy = PROBLEMS.get(code, (f"NVML failed: {e}", "run nvidia-smi: it should say why"))
        return Report(problem=problem, remedy=remedy)


def gpus(nvml: Any = None) -> list[Gpu]:
    """Return all GPUs of this machine in NVML order, including hidden ones; [] if NVML can't be read."""
    return list(report(nvml).gpus)


def _read(nvml: Any, brief: bool) -> Report:
    version = ask(nvml, "nvmlSystemGetCudaDriverVersion_v2") or ask(nvml, "nvmlSystemGetCudaDriverVersion")
    count = ask(nvml, "nvmlDeviceGetCount") or 0
    handles = [(i, ask(nvml, "nvmlDeviceGetHandleByIndex", i)) for i in range(count)]
    handles = [(i, h) for i, h in handles if h is not None]  # a lost card must not hide the others
    cards = tuple(_identity(nvml, i, h) for i, h in handles)
    if not brief:
        cards = tuple(_gpu(nvml, h, card) for (_, h), card in zip(handles, cards, strict=True))
    return Report(
        gpus=cards,
        driver=ask(nvml, "nvmlSystemGetDriverVersion"),
        cuda_driver=(version // 1000, version % 1000 // 10) if version else None,
    )


def _identity(nvml: Any, index: int, handle: Any) -> Gpu:
    """Read what identifies a card and who may use it."""
    modes = ask(nvml, "nvmlDeviceGetMigMode", handle)
    mig = None if modes is None else bool(modes[0])
    return Gpu(
        index=index,
        name=ask(nvml, "nvmlDeviceGetName", handle),
        uuid=ask(nvml, "nvmlDeviceGetUUID", handle),
        mig=mig,
        compute_mode=COMPUTE_MODES.get(ask(nvml, "nvmlDeviceGetComputeMode", handle)),
        **(_mig(nvml, handle) if mig else {}),
    )


def _gpu(nvml: Any, handle: Any, card: Gpu) -> Gpu:
    """Return `card` with everything that can be queried."""

    def get(function: str, *args: Any, then: Callable[[Any], Any] = lambda x: x) -> Any:
        answer = ask(nvml, function, handle, *args)
        return None if answer is None else then(answer)

    memory = get("nvmlDeviceGetMemoryInfo")
    return dataclasses.replace(
        card,
        memory_total_bytes=getattr(memory, "total", None),
        memory_used_bytes=getattr(memory, "used", None),
        compute_capability=get("nvmlDeviceGetCudaComputeCapability", then=tuple),
        power_w=get("nvmlDeviceGetPowerUsage", then=lambda mw: mw / 1000),
        power_limit_w=get("nvmlDeviceGetEnforcedPowerLimit", then=lambda mw: mw / 1000),
        sm_clock_mhz=get("nvmlDeviceGetClockInfo", 1),  # 1: NVML_CLOCK_SM
        sm_clock_max_mhz=get("nvmlDeviceGetMaxClockInfo", 1),
        temperature_c=get("nvmlDeviceGetTemperature", 0),  # 0: NVML_TEMPERATURE_GPU
        throttle=_throttle(nvml, handle),
        processes=_processes(nvml, handle),
    )


def _throttle(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    bits = ask(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:  # the name before driver 535
        bits = ask(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else tuple(name for bit, name in THROTTLE_BITS.items() if bits & bit)


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...] | None:
    found: dict[int, int | None] = {}
    answers = [ask(nvml, f"nvmlDeviceGet{kind}RunningProcesses", handle) for kind in ("Compute", "Graphics")]
    if all(a is None for a in answers):
        return None
    for p in (p for answer in answers if answer for p in answer):
        found[p.pid] = max(found.get(p.pid) or 0, p.usedGpuMemory or 0) or None
    return tuple(Process(pid, memory) for pid, memory in sorted(found.items()))


def _mig(nvml: Any, handle: Any) -> dict[str, tuple]:
    """Return UUID and memory of each of a card's MIG instances."""
    slots = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
    parts = [ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, i) for i in range(slots)]
    found = {ask(nvml, "nvmlDeviceGetUUID", part): part for part in parts if part is not None}
    found.pop(None, None)
    memory = (getattr(ask(nvml, "nvmlDeviceGetMemoryInfo", part), "total", None) for part in found.values())
    return {"mig_uuids": tuple(found), "mig_memory_bytes": tuple(memory)}


Choice = tuple[Gpu | None, str | None]  # (card if known, UUID if it is a MIG instance)


@dataclass(frozen=True)
class Visible:
    """A device that CUDA enumerates. `nvml_index` and `uuid` are None if only CUDA knows them."""

    cuda_index: int
    nvml_index: int | None
    uuid: str | None
    name: str | None
    mig: bool = False
    memory_total_bytes: int | None = None
    """Memory of the card or MIG instance; None from a brief report, or if unknown."""
    exclusive: bool = False
    """Only one process at a time can use it: a second one that starts CUDA there fails."""


def visible(report: Report, environ: Mapping[str, str] | None = None) -> list[Visible] | None:
    """Return the devices that CUDA would enumerate, in its order; None if NVML couldn't be read."""
    if report.problem is not None:
        return None
    environ = os.environ if environ is None else environ
    cards, wanted = list(report.gpus), environ.get("CUDA_VISIBLE_DEVICES")
    in_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g.name for g in cards}) <= 1
    if wanted is None:
        chosen: list[Choice] = [(g if in_order else None, None) for g in cards]
    else:
        chosen = _choose(wanted, cards, in_order)
    return _number(_one_mig_instance(chosen))


def _choose(wanted: str, cards: Sequence[Gpu], in_order: bool) -> list[Choice]:
    """Return each entry's card. As in CUDA, the first bad entry ends the list and a repeated one empties it."""
    chosen: list[Choice] = []
    seen: list[str] = []
    for entry in (e.strip() for e in wanted.split(",")):
        found = _by_uuid(entry, cards) if entry.startswith(("GPU-", "MIG-")) else _by_index(entry, cards, in_order)
        if found is None:
            break
        key = found[1] or (str(found[0].index) if found[0] else entry)
        if key in seen:
            return []
        seen.append(key)
        chosen.append(found)
    return chosen


def _by_uuid(entry: str, cards: Sequence[Gpu]) -> Choice | None:
    """Return the one card or MIG instance whose UUID starts with `entry`, or None."""
    if entry.startswith("GPU-"):
        found = [(g, None) for g in cards if g.uuid and g.uuid.startswith(entry)]
    else:
        found = [(g, uuid) for g in cards for uuid in g.mig_uuids if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _by_index(entry: str, cards: Sequence[Gpu], in_order: bool) -> Choice | None:
    digits = re.match(r"\d+", entry)  # CUDA reads a leading number and ignores the rest
    if digits is None or int(digits[0]) >= len(cards):
        return None
    return (cards[int(digits[0])] if in_order else None), None


def _one_mig_instance(chosen: list[Choice]) -> list[Choice]:
    """Keep at most one MIG instance, as CUDA does. Drop cards in MIG mode without instances."""
    usable = []
    for card, mig in chosen:
        if card and card.mig and mig is None:
            mig = card.mig_uuids[0] if card.mig_uuids else None
        if not (card and card.mig and mig is None):
            usable.append((card, mig))
    return [c for c in usable if c[1]][:1] or usable


def _number(chosen: list[Choice]) -> list[Visible]:
    return [_visible(i, card, mig) for i, (card, mig) in enumerate(chosen)]


def _visible(index: int, card: Gpu | None, mig: str | None) -> Visible:
    if card is None:
        return Visible(index, None, None, None)
    instances = dict(zip(card.mig_uuids, card.mig_memory_bytes, strict=False))
    memory = instances.get(mig) if mig else card.memory_total_bytes
    exclusive = card.compute_mode == "exclusive process"
    return Visible(index, card.index, mig or card.uuid, card.name, bool(mig), memory, exclusive)


def nvml_index_of(cuda_uuids: Sequence[str], cards: Sequence[Gpu]) -> list[int | None]:
    """Return the NVML index of each CUDA device, matched by UUID; None if NVML doesn't list it.

    torch's UUIDs lack NVML's "GPU-" prefix; letter case is ignored.
    """
    known = {_bare(g.uuid): g.index for g in cards if g.uuid}
    return [known.get(_bare(uuid)) for uuid in cuda_uuids]


def _bare(uuid: str) -> str:
    return str(uuid).lower().removeprefix("gpu-")
