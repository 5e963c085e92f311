"""What this process may use of the machine: cores, memory, shared memory, open files, disk.

`os.cpu_count()` and `free` show the host. The limits of a container or job scheduler are in the control groups, which
have two layouts (v1, v2). Linux's /sys says which logical CPUs form a physical core, which cores share a NUMA node and
which node a GPU is on. Where it doesn't (macOS, some virtual machines), each logical CPU counts as a core on node 0,
and a GPU's node is None.
Source: Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node of the Linux kernel.

Every reader takes the root of a file tree, so tests can pass a copy.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Files of a control group, v2 and v1: limit, use, and the part of the use that the kernel can drop at once.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
UNLIMITED_V1 = 2**60  # cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63


@dataclass(frozen=True)
class Container:
    """Limits of this process; None if there is no limit or it can't be read."""

    cores: int
    """Cores to plan with, within affinity and quota; at least 1."""
    affinity: tuple[int, ...]
    cpu_quota: float | None
    """CPU seconds per second that the control group grants."""
    memory_limit_bytes: int | None
    memory_available_bytes: int
    shm_bytes: int | None
    """Size of /dev/shm, through which DataLoader workers pass batches; Docker's default is 64 MiB."""
    shm_free_bytes: int | None
    open_files: int | None
    disk_free_bytes: int | None


def affinity() -> tuple[int, ...]:
    """Return the logical CPUs this process may run on. macOS and Windows have no such call, so it returns all."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores(cores: Collection[int], quota: float | None) -> int:
    """Return how many busy threads can run at full speed: the affinity's `cores`, cut by a CPU quota.

    A quota of 1.5 gives 1, because a second thread would be stopped half of the time.
    """
    allowed = len(cores) if quota is None else min(len(cores), math.floor(quota))
    return max(1, allowed)


def core_count() -> int:
    """Return how many cores this process can use (affinity and control group)."""
    return usable_cores(affinity(), cpu_quota())


def cpu_quota_v2(text: str) -> float | None:
    """Parse `cpu.max` into cores: "150000 100000" is 1.5, "max 100000" is None."""
    quota, _, period = text.strip().partition(" ")
    return None if quota in ("", "max") else int(quota) / int(period or 100_000)


def cpu_quota_v1(quota: str, period: str) -> float | None:
    """Parse `cpu.cfs_quota_us` and `cpu.cfs_period_us` into cores; a quota of -1 is None."""
    return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None


def memory_limit(text: str) -> int | None:
    """Parse `memory.max` (v2) or `memory.limit_in_bytes` (v1) into bytes; None means no limit."""
    if text.strip() in ("", "max"):
        return None
    return int(text) if int(text) < UNLIMITED_V1 else None


def cpu_quota(root: str | Path = "/") -> float | None:
    """Return the tightest CPU quota of this process's control group and its parents."""
    found = []
    for group in _groups(Path(root), "cpu"):
        if text := _text(group / "cpu.max"):
            found.append(cpu_quota_v2(text))
        quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        if quota and period:
            found.append(cpu_quota_v1(quota, period))
    return min((q for q in found if q is not None), default=None)


def memory_limit_bytes(root: str | Path = "/") -> int | None:
    """Return the tightest memory limit of this process's control group and its parents."""
    texts = (_text(g / limit) for g in _groups(Path(root), "memory") for limit, *_ in MEMORY_FILES)
    return min((m for t in texts if t and (m := memory_limit(t)) is not None), default=None)


def memory_room_bytes(root: str | Path = "/") -> int | None:
    """Return the bytes that this process can still allocate: the smallest limit minus use among its control groups.

    Files that the kernel can drop at once (inactive_file) don't count as used.
    """
    found = []
    for group in _groups(Path(root), "memory"):
        for limit, used, cache in MEMORY_FILES:
            most, now = memory_limit(_text(group / limit)), _text(group / used)
            if most is not None and now:
                stat = dict(line.split(maxsplit=1) for line in _text(group / "memory.stat").splitlines())
                found.append(max(0, most - max(0, int(now) - int(stat.get(cache, 0)))))
    return min(found, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, in both layouts.

    /proc/self/cgroup has lines "id:controllers:path"; v2 has one line "0::path". In a container, the path can be the
    host's while only the top of the tree is mounted. Then this yields only the top.
    """
    base = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "0::/").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [base, base / "unified"]
        elif controller in controllers.split(","):
            tops = [base / controllers, base / controller]
        else:
            continue
        inner = Path(path.lstrip("/"))
        yield from (top / part for top in tops for part in (inner, *inner.parents) if (top / part).is_dir())


def _limit(name: str) -> int | None:
    """Return this process's soft limit `name` (resource.RLIMIT_*); None if unlimited or unknown."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _disk(path: str | Path) -> tuple[int | None, int | None]:
    """Return (size, free) in bytes of the file system that holds `path`."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total, usage.free


def container(root: str | Path = "/", folder: str | Path = ".") -> Container:
    """Read the limits of this process, with the free disk space of `folder`."""
    import psutil

    cores, quota, limit = affinity(), cpu_quota(root), memory_limit_bytes(root)
    bounds = (psutil.virtual_memory().available, limit, memory_room_bytes(root))
    shm_bytes, shm_free = _disk(Path(root) / "dev/shm")
    return Container(
        cores=usable_cores(cores, quota),
        affinity=cores,
        cpu_quota=quota,
        memory_limit_bytes=limit,
        memory_available_bytes=min(b for b in bounds if b is not None),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free,
        open_files=_limit("RLIMIT_NOFILE"),
        disk_free_bytes=_disk(folder)[1],
    )


@dataclass(frozen=True)
class Core:
    """A physical core of this machine, as far as this process may use it."""

    id: int
    """Its lowest logical CPU on the whole machine, whatever this process may use."""
    cpus: tuple[int, ...]
    """The logical CPUs (hyper-threads) of it that this process may use, ascending; at least one."""
    node: int
    """NUMA node. Memory of other nodes is slower."""


def cores(cpus: Iterable[int], root: str | Path = "/") -> list[Core]:
    """Return the physical cores that the logical CPUs `cpus` belong to, sorted by node and id."""
    top = Path(root) / "sys/devices/system"
    nodes = {cpu: int(p.parent.name[4:]) for p in top.glob("node/node*/cpulist") for cpu in cpu_list(_text(p))}
    members: dict[int, list[int]] = {}
    for cpu in sorted(set(cpus)):
        members.setdefault(min(_siblings(top, cpu)), []).append(cpu)
    found = [Core(first, tuple(own), nodes.get(first, 0)) for first, own in members.items()]
    return sorted(found, key=lambda core: (core.node, core.id))


def _siblings(top: Path, cpu: int) -> tuple[int, ...]:
    folder = top / f"cpu/cpu{cpu}/topology"
    # The first file name is the one since Linux 5.3.
    return cpu_list(_text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")) or (cpu,)


def cpu_list(text: str) -> tuple[int, ...]:
    """Parse /sys's "0-2,8" into (0, 1, 2, 8); () for an empty text."""
    parts = [part.partition("-") for part in text.split(",") if part.strip()]
    return tuple(cpu for low, _, high in parts for cpu in range(int(low), int(high or low) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
