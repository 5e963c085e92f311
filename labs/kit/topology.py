"""Which logical CPUs are one physical core, which cores share a NUMA node, and which node a GPU hangs on: Linux's /sys.

Every reader takes the root of a file tree, so that it can be tested on a copy. What /sys does not tell (macOS, some
virtual machines) is not guessed: each logical CPU is then a core of its own, all on node 0, and a GPU's node is None.
Source: Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node of the Linux kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Core:
    """A physical core of this machine, as far as this process may use it."""

    id: int
    """Its lowest logical CPU on the whole machine: the same for everyone, whatever they may use."""
    cpus: tuple[int, ...]
    """Those of its logical CPUs (hyper-threads) that may be used, ascending; at least one."""
    node: int
    """NUMA node: memory of another node is further away."""


def cores(cpus: Iterable[int], root: str | Path = "/") -> list[Core]:
    """The physical cores that the logical CPUs `cpus` belong to, by node and number."""
    top = Path(root) / "sys/devices/system"
    nodes = {cpu: int(p.parent.name[4:]) for p in top.glob("node/node*/cpulist") for cpu in cpu_list(_text(p))}
    members: dict[int, list[int]] = {}
    for cpu in sorted(set(cpus)):
        members.setdefault(min(_siblings(top, cpu)), []).append(cpu)
    found = [Core(first, tuple(own), nodes.get(first, 0)) for first, own in members.items()]
    return sorted(found, key=lambda core: (core.node, core.id))


def _siblings(top: Path, cpu: int) -> tuple[int, ...]:
    folder = top / f"cpu/cpu{cpu}/topology"
    # The first name is the one since Linux 5.3.
    return cpu_list(_text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")) or (cpu,)


def gpu_node(pci_bus_id: str | None, root: str | Path = "/") -> int | None:
    """NUMA node of the GPU at this PCI address, as NVML writes it; None if unknown (/sys says -1 for "no node")."""
    domain, _, rest = (pci_bus_id or "").lower().partition(":")
    text = _text(Path(root) / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")  # NVML's domain has 8 digits
    return int(text) if text.isdigit() else None


def cpu_list(text: str) -> tuple[int, ...]:
    """ "0-2,8" as (0, 1, 2, 8), the form of /sys and of taskset; () for no text."""
    parts = [part.partition("-") for part in text.split(",") if part.strip()]
    return tuple(cpu for low, _, high in parts for cpu in range(int(low), int(high or low) + 1))


def as_cpu_list(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 8) as "0-2,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
