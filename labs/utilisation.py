"""A device is 100 % busy: how much of its speed does it use?

    python -m labs.utilisation --nproc 1
    torchrun --nproc-per-node 1 -m labs.utilisation --window-s 0.2

About 6 s on 2 CPU cores. Rank 0 runs six jobs, the other ranks wait. A counter of busy time only says that something
ran. On a CPU it is this process's CPU time. On a GPU it is NVML's utilization.gpu, which nvidia-smi shows; one thread
of one kernel is enough to raise it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from labs.common.timing import probing, roofline
from labs.common.timing.busy import Counter, counter_of, work_for
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

CHUNK_S = 2e-3
"""Work between two clock readings."""
ARRAY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Config:
    """How long each job runs."""

    windows: Annotated[int, Ge(1)] = 6
    """Windows per job; each gives one sample."""
    window_s: Annotated[float, Gt(0), Le(60)] = 0.1
    """Length of a window, in s."""
    wait_ms: Annotated[float, Ge(0), Le(1000)] = 8.0
    """Sleep before every batch in "waiting for data", in ms."""
    smoke: bool = False
    """Run two short windows per job."""


@dataclass(frozen=True)
class Job:
    """`step` does `flop` floating point operations, after waiting `wait_s` for its data."""

    step: Callable[[], object]
    flop: float
    wait_s: float = 0.0


def jobs(config: Config, device: torch.device) -> dict[str, Job]:
    """Return jobs that keep the device busy. PyTorch counts a product's FLOPs; an addition counts one per element."""
    large = _product(512 if device.type == "cpu" else 4096, device)
    array, number = (torch.zeros(n, device=device) for n in (ARRAY_BYTES // 4, 1))
    columns = torch.ones(200_000, 2, device=device)
    return {
        "large products": large,
        "small products": _product(16, device),
        "memory traffic": _addition(array),
        "one number at a time": _addition(number),
        "waiting for data": Job(large.step, large.flop, config.wait_ms / 1e3),
        "one long kernel": Job(lambda: columns.cumsum(0), columns.numel()),  # on a GPU one thread per column
    }


def _product(n: int, device: torch.device) -> Job:
    step = probing.matmul_step("fp32", n, device)
    return Job(step, roofline.count(step).flop)


def _addition(array: Tensor) -> Job:
    return Job(lambda: array.add_(1.0), array.numel())


def chunks(job: Job, device: torch.device) -> tuple[Callable[[], None], float]:
    """Return (function that works for about CHUNK_S, its FLOPs); a job that waits does one step per wait."""
    inner = 1 if job.wait_s else probing.inner_calls(job.step, device, CHUNK_S)

    def chunk() -> None:
        if job.wait_s:
            time.sleep(job.wait_s)
        for _ in range(inner):
            job.step()
        measure.sync(device)

    return chunk, inner * job.flop


def watch(job: Job, config: Config, counter: Counter, device: torch.device) -> tuple[list[float], list[float]]:
    """Return each window's (busy share, FLOP/s), after the job has run long enough for the counter to settle."""
    chunk, flop = chunks(job, device)
    seconds, n = (0.02, 2) if config.smoke else (config.window_s, config.windows)
    work_for(counter.memory_s, chunk, counter)
    shares, rates = [], []
    for _ in range(n):
        marks = work_for(seconds, chunk, counter)
        (start, before), (end, after) = marks[0], marks[-1]
        shares.append((after - before) / (end - start))
        rates.append((len(marks) - 1) * flop / (end - start))
    return shares, rates


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Run the jobs one by one on rank 0 while the others wait."""
    if rank.rank == 0:
        with counter_of(rank.device) as counter:
            yield from _alone(config, rank, counter)
    rank.barrier()


def _alone(config: Config, rank: Rank, counter: Counter) -> Iterator[Record]:
    todo, peak = jobs(config, rank.device), 0.0
    for done, (name, job) in enumerate(todo.items(), start=1):
        shares, rates = watch(job, config, counter, rank.device)
        peak = peak or max(rates)  # peak of the first job, the large products
        yield rank.record("busy_share", "1", shares, rank=0, job=name, counter=counter.name)
        yield rank.record("flop_s", "FLOP/s", rates, rank=0, job=name)
        yield rank.record("share_of_peak", "1", [r / peak for r in rates], rank=0, job=name)
        rank.progress(done, len(todo), name)


def answer(run: Records) -> Iterator[str]:
    """Yield which jobs look busy but are slow, and whether a wait shows."""
    busy, speed = (
        {r.case["job"]: measure.estimate(r.samples).scaled(100, "%") for r in run.where(metric)}
        for metric in ("busy_share", "share_of_peak")
    )
    first, counter = next(iter(busy)), run.where("busy_share")[0].case["counter"]
    slow = [job for job in busy if busy[job].value > 0.9 * busy[first].value and speed[job].high < 10]
    yield f"Counter read: {counter}. It shows {busy[first]} during {first}, the fastest job."
    if slow:
        worst = min(slow, key=lambda job: speed[job].value)
        yield f"As busy, with under a tenth of its speed: {', '.join(slow)}; {worst} reaches {speed[worst]}."
    else:
        yield "No job that looked as busy ran below a tenth of its speed."
    wait = busy["waiting for data"]
    seen = "shows" if wait.high < 0.9 * busy[first].low else "does not show"
    yield f"A planted wait for data {seen}: busy {wait}."


if __name__ == "__main__":
    cli.main()
