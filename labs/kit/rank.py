"""One rank's view of the job: its device, its process group, its records."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from labs.kit import timeouts
from labs.kit.hardware import Device
from labs.kit.host import affinity
from labs.kit.record import Kind, Record
from labs.kit.restart import use_fresh_store, was_restarted


@dataclass
class Rank:
    """What a lab's `run(config, rank)` knows about its rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    cores: tuple[int, ...]
    """CPU cores this rank is pinned to; empty if it isn't pinned (GPU ranks)."""
    host_cores: tuple[int, ...] = ()
    """CPU cores that processes of this job may use: the rank's cores before it was pinned."""
    is_unpinned: bool = False
    """Whether processes started now may use all of `host_cores`."""
    startup_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase before the lab began, by name."""
    lab: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    on_progress: Callable[[int, int, str], None] = lambda done, total, message: None

    def record(
        self,
        metric: str,
        unit: str,
        samples: Sequence[float] | float,
        *,
        kind: Kind = "measured",
        rank: int | None = None,
        **case: Any,
    ) -> Record:
        """Return a Record of this run. `rank` None means that the samples describe the whole job."""
        try:
            samples = tuple(samples)
        except TypeError:  # one number, perhaps NumPy's or torch's
            samples = (float(samples),)
        layout = {"world_size": self.world_size, "rank": rank, "backend": self.backend, "device": self.device.type}
        if self.is_unpinned:
            layout["cores"] = len(self.host_cores)
        return Record(self.lab, metric, unit, samples, kind, case, self.config, layout)

    def progress(self, done: int, total: int, message: str = "") -> None:
        """Report progress; only rank 0's is shown. Cheap, but don't call it inside a timed region."""
        if self.rank == 0:
            self.on_progress(done, total, message)

    def barrier(self) -> None:
        """Wait for all ranks on the host. gloo sleeps in the socket, so a waiting rank leaves its core idle."""
        self.slowest([0.0])

    def gather(self, value: Any) -> list[Any]:
        """Return `value` of every rank, in rank order, on every rank."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def agree(self, opinion: bool) -> bool:
        """Return whether `opinion` is true on all ranks, for loops that all ranks must leave at the same step."""
        return self.slowest([0.0 if opinion else 1.0]) == [0.0]

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over all ranks, which must pass equally many samples."""
        worst = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return worst.tolist()


def backend_for(device: Device, nccl: bool) -> str:
    """Return the backend for ranks on devices like `device`. `nccl` says whether this torch has NCCL.

    Ranks with their own GPU use NCCL for CUDA tensors, and gloo for objects and barriers on the host. Ranks on a shared
    GPU or CPU cores use gloo, because NCCL refuses two ranks on one GPU ("Duplicate GPU detected").
    """
    return "cpu:gloo,cuda:nccl" if device.kind == "cuda" and nccl else "gloo"


@contextmanager
def process_group(device: Device, *, seed: int = 0, timeout_s: float = timeouts.COMMAND_S) -> Iterator[Rank]:
    """Join the job that RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT describe; leave it at the end.

    Pins a CPU rank to its cores with one thread each. Makes a GPU rank's device the current one *before* the group
    exists, since otherwise stray contexts appear on GPU 0. Seeds torch with the same number on all ranks. With gloo, a
    collective raises if it waits longer than `timeout_s` or a peer is killed. With NCCL, a watchdog ends the process
    (SIGABRT) after that time, and a killed peer isn't noticed before. The launcher and torchrun notice a dead rank
    themselves and end the others.
    """
    host_cores = affinity()
    place = use(device)
    torch.manual_seed(seed)
    if was_restarted():
        use_fresh_store()
    backend = backend_for(device, dist.is_nccl_available())
    start = time.perf_counter()
    bind = {"device_id": place} if "nccl" in backend else {}
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s), **bind)
    try:
        yield Rank(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            device=place,
            backend=backend,
            cores=device.cores if device.kind == "cpu" else (),
            host_cores=host_cores,
            startup_s={"process group": time.perf_counter() - start},
        )
    finally:
        dist.destroy_process_group()


def use(device: Device) -> torch.device:
    """Use `device`: on a CPU, pin this process and limit its threads; on a GPU, make it the current one."""
    if device.kind == "cpu":
        if hasattr(os, "sched_setaffinity"):  # macOS has no such call, so its scheduler decides
            os.sched_setaffinity(0, device.cores)
        torch.set_num_threads(max(1, len(device.cores)))
        keep_freed_memory()
        return torch.device("cpu")
    place = torch.device("cuda", device.index)
    torch.cuda.set_device(place)
    return place


def same_bits_every_time(device: torch.device) -> None:
    """Make this process use GPU kernels that give the same bits for the same input, if torch has them.

    For runs compared bit for bit. cuDNN's convolutions, for example, add up in any order by default. Operations without
    such a kernel warn and run anyway. Source: PyTorch's notes on reproducibility.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def unpinned(rank: Rank) -> Iterator[None]:
    """Let this thread, and processes started in the block such as DataLoader workers, use all cores of the job.

    Workers inherit their parent's cores, so a pinned rank's workers would share the one core it computes on.
    """
    if not rank.cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    os.sched_setaffinity(0, rank.host_cores)
    rank.is_unpinned = True
    try:
        yield
    finally:
        rank.is_unpinned = False
        os.sched_setaffinity(0, rank.cores)


def keep_freed_memory() -> None:
    """Keep glibc from returning freed memory to the system.

    By default, every activation above a threshold of 128 KB to 32 MB is mapped again and zeroed page by page at each
    step. This takes a tenth of a small CNN's time, makes its timings unsteady, and doesn't happen on GPUs.
    """
    with contextlib.suppress(OSError, AttributeError):  # macOS and musl have no mallopt
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD of malloc.h, in bytes
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; glibc takes no more than 32 MiB
