"""The preflight's checks of the machine: each turns facts into pass, warn or fail, and a remedy.

Fail means that notebooks will not run here; warn means that one of them may, or that timings will suffer.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from labs.kit import build, nvml, visible
from labs.kit.container import Container, container

GIB = 2**30
PROJECT = "gpu-training-course"
OLDEST_PYTHON = (3, 11)
# The most that a notebook took on two CPU cores with torch 2.13: notebook 05's kernel, fork server, ranks and workers,
# shared pages counted once (proportional set size). JupyterLab's server and a browser come on top.
MOST_MEMORY = "3 GiB are needed (the largest notebook takes 1.9)"
MORE_MEMORY = {
    "": "close programs, or raise the container's limit (docker run --memory 4g)",
    "macOS": "close programs; for Docker Desktop: Settings, Resources, Memory",
    "WSL": "close programs, or set memory=4GB under [wsl2] in .wslconfig, then: wsl --shutdown",
}
MOST_DISK = "1 GiB is needed (the largest notebook writes 0.4)"


@dataclass(frozen=True)
class Check:
    """What was looked at, how it stands, and what to do about it."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything the machine checks judge. Gathered once; made up in tests."""

    report: nvml.Report
    visible: list[visible.Visible] | None
    container: Container
    build: dict[str, Any]
    python: tuple[int, int] = sys.version_info[:2]
    torch_pin: str | None = None
    jupyter: bool = True
    port_problem: str | None = None
    require_gpus: int = 0
    my_pids: frozenset[int] = field(default_factory=frozenset)

    @property
    def gpus_for_torch(self) -> int:
        """GPUs that this torch build can see."""
        return len(self.visible or ()) if self.build["cuda"] or self.build["rocm"] else 0

    @property
    def inventory(self) -> dict[str, Any]:
        """All facts as plain JSON values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["visible"] = None if self.visible is None else [dataclasses.asdict(v) for v in self.visible]
        return values | {
            "report": dataclasses.asdict(self.report), "container": dataclasses.asdict(self.container),
            "my_pids": sorted(self.my_pids),
        }  # fmt: skip


def system() -> str:
    """ "Linux", "macOS", "WSL", or what Python calls it."""
    if sys.platform == "darwin":
        return "macOS"
    return "WSL" if "microsoft" in platform.release().lower() else platform.system()


def gather(require_gpus: int = 0) -> Facts:
    """The facts of this machine, read without starting CUDA."""
    found = nvml.report()
    return Facts(
        report=found,
        visible=visible.visible(found),
        container=container(),
        build=build.build(),
        torch_pin=_torch_pin(),
        jupyter=importlib.util.find_spec("jupyterlab") is not None
        and importlib.util.find_spec("ipykernel") is not None,
        port_problem=_port_problem(),
        require_gpus=require_gpus,
        my_pids=frozenset({os.getpid(), os.getppid()}),
    )


def _torch_pin() -> str | None:
    """The torch version this project asks for; None if the project is not installed as a package."""
    try:
        wanted = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((m[1] for line in wanted if (m := re.match(r"torch==([\w.]+)", line))), None)


def _port_problem() -> str | None:
    """Why a server cannot listen on the loopback interface; None if it can."""
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
    except OSError as e:
        return e.strerror or str(e)
    return None


def python(facts: Facts) -> Check:
    """Python is new enough."""
    have, want = (".".join(map(str, v)) for v in (facts.python, OLDEST_PYTHON))
    if facts.python < OLDEST_PYTHON:
        return Check("Python", "fail", f"{have} is older than {want}", f"install Python {want} or later")
    return Check("Python", "pass", have)


def torch_version(facts: Facts) -> Check:
    """torch is the version the course was tested with."""
    have = facts.build["torch"]
    if facts.torch_pin and have.partition("+")[0] != facts.torch_pin:
        return Check("torch", "warn", f"{have}, tested with {facts.torch_pin}", f"pip install torch=={facts.torch_pin}")
    return Check("torch", "pass", have)


def jupyter(facts: Facts) -> Check:
    """Notebooks can be opened."""
    if facts.jupyter:
        return Check("JupyterLab", "pass", "installed, with a Python kernel")
    return Check("JupyterLab", "fail", "jupyterlab or ipykernel is missing", "run: make lab")


def loopback(facts: Facts) -> Check:
    """Ranks find each other through a port on 127.0.0.1."""
    if facts.port_problem is None:
        return Check("network", "pass", "a port on 127.0.0.1 can be opened")
    detail = f"no port on 127.0.0.1 can be opened: {facts.port_problem}"
    return Check(
        "network",
        "fail",
        detail,
        "bring the loopback interface up: " + ("ifconfig lo0 up" if system() == "macOS" else "ip link set lo up"),
    )


def cores(facts: Facts) -> Check:
    """Two ranks on a CPU need two cores."""
    c = facts.container
    quota = f", quota {c.cpu_quota:g}" if c.cpu_quota is not None else ""
    detail = f"{c.cores} usable (affinity {len(c.affinity)}{quota})"
    if c.cores >= 2 or facts.gpus_for_torch >= 2:
        return Check("CPU cores", "pass", detail)
    remedy = "give the container 2 cores (docker run --cpus 2), or run notebooks with NPROC = 1"
    return Check("CPU cores", "warn", detail + ": two ranks would share one core", remedy)


def memory(facts: Facts) -> Check:
    """A kernel, the fork server with torch and two ranks take up to 1.9 GiB; GPUs take more on the host, too."""
    have = facts.container.memory_available_bytes
    if have is None:
        return Check("memory", "warn", "free memory cannot be read", "check that 3 GiB are free")
    limit = facts.container.memory_limit_bytes
    detail = f"{have / GIB:.1f} GiB available" + (f" of a limit of {limit / GIB:.1f} GiB" if limit else "")
    if have >= 3 * GIB:
        return Check("memory", "pass", detail)
    status = "warn" if have >= 1.5 * GIB else "fail"
    return Check("memory", status, f"{detail}, {MOST_MEMORY}", MORE_MEMORY.get(system(), MORE_MEMORY[""]))


def shared_memory(facts: Facts) -> Check:
    """DataLoader workers hand batches over through /dev/shm; a full one is a bus error."""
    size, free = facts.container.shm_bytes, facts.container.shm_free_bytes
    if size is None or free is None:
        return Check("/dev/shm", "pass", "none on this system; workers use other means")
    detail = f"{free / GIB:.2f} of {size / GIB:.2f} GiB free"
    if free >= GIB / 2:
        return Check("/dev/shm", "pass", detail)
    return Check("/dev/shm", "warn", detail + ": DataLoader workers may die of a bus error",
                 "start the container with --shm-size 2g (or --ipc=host)")  # fmt: skip


def open_files(facts: Facts) -> Check:
    """Workers and ranks pass tensors as open files."""
    limit = facts.container.open_files
    if limit is None or limit >= 1024:
        return Check("open files", "pass", "no limit" if limit is None else f"at most {limit}")
    return Check("open files", "warn", f"at most {limit}: many DataLoader workers may fail", "run: ulimit -n 4096")


def disk(facts: Facts) -> Check:
    """Caches, checkpoints and executed notebooks need a little room."""
    free = facts.container.disk_free_bytes
    if free is None:
        return Check("disk", "warn", "free space cannot be read", "check that 1 GiB is free")
    status = "pass" if free >= GIB else "warn" if free >= GIB / 10 else "fail"
    if status == "pass":
        return Check("disk", "pass", f"{free / GIB:.1f} GiB free")
    return Check("disk", status, f"{free / GIB:.1f} GiB free, {MOST_DISK}", "free 1 GiB on the disk with this folder")


ALL = (python, torch_version, jupyter, loopback, cores, memory, shared_memory, open_files, disk)
