"""Check whether this machine is ready. One line per check: pass, warn or fail, with the remedy.

Fail means that notebooks won't run here. Warn means that one may fail, or that timings will suffer. The checks are
functions of plain `Facts`, so every outcome can be tested on any machine.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from labs.kit import hardware, nvml, requirements
from labs.kit.host import Container, container
from labs.kit.record import Records

GIB = 2**30
MARKS = {"pass": "ok  ", "warn": "WARN", "fail": "FAIL"}
OLDEST_PYTHON = (3, 11)
# Measured on two CPU cores with torch 2.13: notebook 05's kernel, fork server, ranks and workers, with shared pages
# counted once (proportional set size). JupyterLab's server and a browser need more.
MOST_MEMORY = "3 GiB are needed (the largest notebook takes 1.9)"
MORE_MEMORY = {
    "": "close programs, or raise the container's limit (docker run --memory 4g)",
    "macOS": "close programs; for Docker Desktop: Settings, Resources, Memory",
    "WSL": "close programs, or set memory=4GB under [wsl2] in .wslconfig, then: wsl --shutdown",
}
MOST_DISK = "1 GiB is needed (the largest notebook writes 0.4)"


@dataclass(frozen=True)
class Check:
    """What was checked, the result, and what to do about it."""

    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that the machine checks judge. Gathered once; tests make up their own."""

    report: nvml.Report
    visible: list[nvml.Visible] | None
    container: Container
    build: dict[str, Any]
    python: tuple[int, int] = sys.version_info[:2]
    torch_pin: str | None = None
    jupyter: bool = True
    port_problem: str | None = None
    require_gpus: int = 0
    my_pids: frozenset[int] = field(default_factory=frozenset)
    known_pids: frozenset[int] | None = None
    """Processes visible from here. Inside a container, NVML lists processes by the host's numbers."""

    @property
    def gpus_for_torch(self) -> int:
        """Number of GPUs that this torch build can see."""
        return len(self.visible or ()) if self.build["cuda"] or self.build["rocm"] else 0

    @property
    def inventory(self) -> dict[str, Any]:
        """All facts as plain JSON values, without the process ids."""
        values = dataclasses.asdict(self)
        return {name: values[name] for name in values if name not in ("my_pids", "known_pids")}


def system() -> str:
    """Return "Linux", "macOS", "WSL", or Python's name for the system."""
    if sys.platform == "darwin":
        return "macOS"
    return "WSL" if "microsoft" in platform.release().lower() else platform.system()


def gather(require_gpus: int = 0) -> Facts:
    """Read the facts of this machine without starting CUDA."""
    import psutil  # here, because the preflight also reports what a Python without any package lacks

    found = nvml.report()
    return Facts(
        report=found,
        visible=nvml.visible(found),
        container=container(),
        build=hardware.build(),
        torch_pin=_torch_pin(),
        jupyter="ipykernel" in sys.modules  # a notebook is open, perhaps with another front end, as on Colab
        or all(importlib.util.find_spec(name) for name in ("jupyterlab", "ipykernel")),
        port_problem=_port_problem(),
        require_gpus=require_gpus,
        my_pids=frozenset({os.getpid(), os.getppid()}),
        known_pids=frozenset(psutil.pids()),
    )


def _torch_pin() -> str | None:
    """Return the torch version that the course was tested with; None if labs was installed without its repository."""
    try:
        return requirements.tested()
    except FileNotFoundError:
        return None


def _port_problem() -> str | None:
    """Return why a server can't listen on the loopback interface; None if it can."""
    try:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
    except OSError as e:
        return e.strerror or str(e)
    return None


def python(facts: Facts) -> Check:
    """Check that Python is new enough."""
    have, want = (".".join(map(str, v)) for v in (facts.python, OLDEST_PYTHON))
    if facts.python < OLDEST_PYTHON:
        return Check("Python", "fail", f"{have} is older than {want}", f"install Python {want} or later")
    return Check("Python", "pass", have)


def torch_version(facts: Facts) -> Check:
    """Check that torch is the tested version, or at least new enough."""
    have = facts.build["torch"]
    if problem := requirements.torch_problem(have):
        detail, _, remedy = problem.partition(": ")
        return Check("torch", "fail", detail, remedy)
    if facts.torch_pin and have.partition("+")[0] != facts.torch_pin:
        return Check(
            "torch",
            "warn",
            f"{have}, tested with {facts.torch_pin}",
            f"you can continue; to install the tested version: python -m pip install torch=={facts.torch_pin}",
        )
    return Check("torch", "pass", have)


def jupyter(facts: Facts) -> Check:
    """Check that notebooks can be opened."""
    if facts.jupyter:
        return Check("JupyterLab", "pass", "installed, with a Python kernel")
    return Check("JupyterLab", "fail", "jupyterlab or ipykernel is missing", "run: make lab")


def loopback(facts: Facts) -> Check:
    """Check that ranks can meet through a port on 127.0.0.1."""
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
    """Check that there are two cores for two ranks."""
    c = facts.container
    quota = f", quota {c.cpu_quota:g}" if c.cpu_quota is not None else ""
    detail = f"{c.cores} usable (affinity {len(c.affinity)}{quota})"
    if c.cores >= 2 or facts.gpus_for_torch >= 2:
        return Check("CPU cores", "pass", detail)
    remedy = "give the container 2 cores (docker run --cpuset-cpus 0,1), or run notebooks with NPROC = 1"
    return Check("CPU cores", "warn", detail + ": two ranks would share one core", remedy)


def memory(facts: Facts) -> Check:
    """Check memory: a kernel, the fork server and two ranks take up to 1.9 GiB, and more on the host with GPUs."""
    have = facts.container.memory_available_bytes
    limit = facts.container.memory_limit_bytes
    detail = f"{have / GIB:.1f} GiB available" + (f" of a limit of {limit / GIB:.1f} GiB" if limit else "")
    if have >= 3 * GIB:
        return Check("memory", "pass", detail)
    status = "warn" if have >= 1.5 * GIB else "fail"
    return Check("memory", status, f"{detail}, {MOST_MEMORY}", MORE_MEMORY.get(system(), MORE_MEMORY[""]))


def shared_memory(facts: Facts) -> Check:
    """Check /dev/shm, through which DataLoader workers pass batches; a full one causes a bus error."""
    size, free = facts.container.shm_bytes, facts.container.shm_free_bytes
    if size is None or free is None:
        return Check("/dev/shm", "pass", "none on this system; workers use other means")
    detail = f"{free / GIB:.2f} of {size / GIB:.2f} GiB free"
    if free >= GIB / 2:
        return Check("/dev/shm", "pass", detail)
    return Check(
        "/dev/shm",
        "warn",
        detail + ": DataLoader workers may die of a bus error",
        "start the container with --shm-size 2g (or --ipc=host)",
    )


def open_files(facts: Facts) -> Check:
    """Check the limit on open files, through which ranks and workers pass tensors."""
    limit = facts.container.open_files
    if limit is None or limit >= 1024:
        return Check("open files", "pass", "no limit" if limit is None else f"at most {limit}")
    return Check("open files", "warn", f"at most {limit}: many DataLoader workers may fail", "run: ulimit -n 4096")


def disk(facts: Facts) -> Check:
    """Check free disk space for caches, checkpoints and executed notebooks."""
    free = facts.container.disk_free_bytes
    if free is None:
        return Check("disk", "warn", "free space cannot be read", "check that 1 GiB is free")
    status = "pass" if free >= GIB else "warn" if free >= GIB / 10 else "fail"
    if status == "pass":
        return Check("disk", "pass", f"{free / GIB:.1f} GiB free")
    return Check("disk", status, f"{free / GIB:.1f} GiB free, {MOST_DISK}", "free 1 GiB on the disk with this folder")


ALL = (python, torch_version, jupyter, loopback, cores, memory, shared_memory, open_files, disk)
UNHIDE = "check CUDA_VISIBLE_DEVICES, MIG instances (nvidia-smi -L) and what the scheduler gave you"


def machine_checks(facts: Facts) -> list[Check]:
    """Judge everything that needs no running rank."""
    found = [check(facts) for check in (*ALL, gpus)]
    used = {v.nvml_index for v in facts.visible or ()} if facts.gpus_for_torch else set()
    for card in facts.report.gpus:
        if card.index in used or (used == {None}):
            found += gpu_checks(card, facts)
    return found


def gpus(facts: Facts) -> Check:
    """Check how many GPUs torch can use, and whether that is enough."""
    n, here = facts.gpus_for_torch, len(facts.report.gpus)
    enough = n >= facts.require_gpus
    wanted = "" if enough else f", {facts.require_gpus} required"
    if n:
        names = ", ".join(v.name or "a GPU" for v in facts.visible or ())
        detail = f"{n} for torch: {names} (driver {facts.report.driver}){wanted}"
        return Check("GPUs", "pass", detail) if enough else Check("GPUs", "fail", detail, UNHIDE)
    bad = "warn" if enough else "fail"
    if here and not facts.build["cuda"] and not facts.build["rocm"]:
        detail = f"{here} here, but this torch is a CPU build ({facts.build['torch']}){wanted}"
        return Check("GPUs", bad, detail, "install a CUDA build: see pytorch.org/get-started")
    if here:
        return Check("GPUs", bad, f"{here} here, none visible to CUDA{wanted}", UNHIDE)
    if enough:
        return Check("GPUs", "pass", "no GPU here: devices are CPU cores, every notebook runs")
    detail = f"no GPU here{wanted}: {facts.report.problem or 'the driver lists none'}"
    return Check("GPUs", "fail", detail, facts.report.remedy or "run nvidia-smi: it should list the cards")


def gpu_checks(card: nvml.Gpu, facts: Facts) -> Iterator[Check]:
    """Check one GPU that torch will use."""
    where = f"GPU {card.index}"
    yield driver(where, facts)
    if card.compute_capability:
        yield architecture(where, card.compute_capability, facts.build["arch_list"])
    yield neighbours(where, card, facts.my_pids, facts.known_pids)
    if card.compute_mode not in (None, "default"):
        detail = f"compute mode is {card.compute_mode}: a second process that uses this GPU fails"
        yield Check(
            where, "warn", detail, "nvidia-smi -c DEFAULT (as root); some experiments start processes of their own"
        )
    if card.mig:
        detail = f"MIG mode, {len(card.mig_uuids)} instances: a process sees at most one of them"
        remedy = "choose one with CUDA_VISIBLE_DEVICES=MIG-...; several ranks need several jobs"
        yield Check(where, "warn" if card.mig_uuids else "fail", detail, remedy)
    if slow := set(card.throttle or ()) - {"application clocks setting", "display clock setting"}:
        yield Check(where, "warn", f"clocks are held down: {', '.join(sorted(slow))}", "check cooling and power")


def driver(where: str, facts: Facts) -> Check:
    """Check that the driver supports the CUDA that torch was built with (minor versions are compatible)."""
    have, built = facts.report.cuda_driver, facts.build["cuda"]
    if not have or not built:
        return Check(where, "pass", "driver and build cannot be compared")
    want = tuple(int(part) for part in built.split(".")[:2])
    detail = f"driver for CUDA {have[0]}.{have[1]}, torch built with {built}"
    if have[0] >= want[0]:
        return Check(where, "pass", detail)
    return Check(where, "fail", detail, f"update the driver, or install a torch built with CUDA {have[0]}")


def architecture(where: str, capability: tuple[int, int], arch_list: list[str]) -> Check:
    """Check that torch has kernels that this card can run."""
    name = f"sm_{capability[0]}{capability[1]}"
    how = hardware.runs_on(capability, arch_list)
    if how == "native":
        return Check(where, "pass", f"kernels for {name} are in this torch")
    if how == "ptx":
        return Check(
            where,
            "warn",
            f"no kernels for {name} in this torch: PTX is compiled at first use",
            "the first start is slow; a newer torch build avoids it",
        )
    have = ", ".join(arch_list) or "none"
    return Check(where, "fail", f"no kernels for {name} in this torch (it has {have})", "install a torch for this card")


def neighbours(where: str, card: nvml.Gpu, mine: frozenset[int], known: frozenset[int] | None = None) -> Check:
    """Check for other programs on the card, which take memory and disturb timings.

    `known`: processes visible from here; None means all. Any other may be one of ours under the host's number.
    """
    if card.processes is None:
        return Check(where, "pass", "other processes cannot be listed here")
    others = [p for p in card.processes if p.pid not in mine]
    hidden = [p for p in others if known is not None and p.pid not in known]
    if not others:
        return Check(where, "pass", "no other processes on it")
    if len(hidden) == len(others):
        holds = sum(p.memory_bytes or 0 for p in hidden) / GIB
        numbers = ", ".join(str(p.pid) for p in hidden)
        detail = f"{holds:.1f} GiB used by host processes ({numbers}) that can't be identified from this container"
        return Check(where, "warn", detail, "run nvidia-smi on the host: it names them")
    others = [p for p in others if p not in hidden]
    who = ", ".join(f"pid {p.pid}" + (f" {p.memory_bytes / GIB:.1f} GiB" if p.memory_bytes else "") for p in others)
    return Check(where, "warn", f"also used by {who}", "timings will suffer: take another card or wait")


def rank_checks(records: Records, seconds: float, facts: Facts) -> list[Check]:
    """Judge what the ranks did: their process group, its backend, right results."""
    layout = records[0].layout
    n, backend, device = layout["world_size"], layout["backend"], layout["device"]
    found = [Check("process group", "pass", f"{n} ranks on {device} through {backend} in {seconds:.1f} s")]
    if device == "cuda" and "nccl" not in backend and not facts.build["nccl"]:
        found = [Check("process group", "warn", f"{n} ranks on GPUs without NCCL", "install a torch with NCCL")]
    product = max(r.value for r in records.where("matmul_relative_error"))
    reduced = max(r.value for r in records.where("all_reduce_error"))
    found.append(_right("matrix product", product, 1e-2, f"relative error {product:.0e} on {device}"))
    found.append(_right("all-reduce", reduced, 0.0, f"sum over {n} ranks is " + ("right" if reduced == 0 else "wrong")))
    return found


def _right(name: str, error: float, allowed: float, detail: str) -> Check:
    if error <= allowed:  # False for NaN
        return Check(name, "pass", detail)
    return Check(name, "fail", detail, "the hardware or the torch build gives wrong results: don't train on it")


def exit_code(found: list[Check]) -> int:
    """Return 1 if a check failed, otherwise 0: a warning doesn't stop a workshop."""
    return int(any(c.status == "fail" for c in found))


def as_text(found: list[Check]) -> str:
    """Return one line per check; for a problem, the remedy follows."""
    lines = []
    for c in found:
        lines.append(f"{MARKS[c.status]}  {c.name:<18} {c.detail}")
        if c.remedy:
            lines.append(f"{'':6}{'':<18} -> {c.remedy}")
    counts = {s: sum(c.status == s for c in found) for s in MARKS}
    verdict = "NOT READY" if counts["fail"] else "READY"
    plural = "warning" if counts["warn"] == 1 else "warnings"
    return "\n".join([*lines, f"{verdict}: {counts['pass']} ok, {counts['warn']} {plural}, {counts['fail']} failed"])
