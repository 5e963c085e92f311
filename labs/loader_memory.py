"""How much memory does a list of paths take in a training process and its workers together?

    python -m labs.loader_memory --nproc 1      |      python -m labs.loader_memory --nproc 1 --paths 1000000

About 10 s on 2 CPU cores. A process builds a data set of paths, starts workers by fork, forkserver or spawn, and lets
every worker read every path. The result is the PSS of all these processes, which counts a page shared by n processes as
1/n in each, minus the PSS of the same run without paths. Linux only.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Le
from torch.utils.data import DataLoader

from labs.common.loading.feed import running
from labs.common.loading.paths import NOTHING, Paths, give_back
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records

Held = Literal["list", "np.array of str", "np.array of bytes", "tensor and offsets"]
Method = Literal["fork", "forkserver", "spawn"]
COUNTED = ("Pss_Anon", "Pss_Shmem")
"""Lines of /proc/PID/smaps_rollup that count: anonymous memory and shared memory."""


@dataclass(frozen=True)
class Config:
    """How many paths, in which container, in how many workers."""

    paths: Annotated[int, Ge(1000), Le(10_000_000)] = 250_000
    """Number of paths, of 36 ASCII characters each."""
    workers: Annotated[int, Ge(1), Le(64)] = 2
    """num_workers."""
    held: tuple[Held, ...] = get_args(Held)
    """Containers of the paths to compare."""
    methods: tuple[Method, ...] = get_args(Method)
    """Start methods of the workers."""
    smoke: bool = False
    """Use 1,000 paths, and only fork."""

    def __post_init__(self) -> None:
        require(bool(self.held and self.methods), "held and methods must not be empty")


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput where the kernel doesn't report PSS."""
    require(os.path.exists("/proc/self/smaps_rollup"), "this experiment needs Linux: only its kernel counts PSS")


def pss(pids: Iterable[int]) -> int:
    """Sum the proportional set sizes of these processes, in bytes, without files such as PyTorch's libraries."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            kilobytes = {
                name: int(rest.split()[0])
                for name, _, rest in (line.partition(":") for line in file)
                if name in COUNTED
            }
        total += 1024 * sum(kilobytes.values())
    return total


def totals(config: Config, method: str, paths: int, answer: Connection) -> None:
    """Send {container: bytes of trainer and workers, minus those of a data set without paths} through `answer`."""
    sys.modules["__main__"] = ModuleType("__main__")  # otherwise spawned workers would import our parent's main program
    multiprocessing.set_forkserver_preload(["torch.utils.data", "labs.common.loading.paths"])
    found: dict[str, int] = {}
    alone: list[int] = []  # the trainer's bytes before each case except the first, which loads what all of them need
    for held in (NOTHING, *config.held):
        gc.collect()
        give_back()
        if found:
            alone.append(pss([os.getpid()]))
        data = Paths(held, paths)
        loader = DataLoader(data, None, num_workers=config.workers, prefetch_factor=1, multiprocessing_context=method)
        with running(loader) as batches:
            workers = {next(batches) for _ in range(config.workers)}
            give_back()
            left_over = alone[-1] - alone[0] if alone else 0  # left by earlier cases
            found[held] = pss({*workers, os.getpid()}) - left_over
        del data, loader, batches
    answer.send({held: size - found[NOTHING] for held, size in found.items() if held != NOTHING})
    answer.recv()  # stay alive while others measure, so that shared pages stay shared


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure each start method in a separate process. All but fork run at the same time: they share no pages."""
    if rank.rank == 0:
        paths, methods = (1000, ("fork",)) if config.smoke else (config.paths, config.methods)
        groups = [[m for m in methods if m == "fork"], [m for m in methods if m != "fork"]]
        with unpinned(rank):
            for done, group in enumerate(groups, start=1):
                for method, sizes in in_processes(config, group, paths).items():
                    for held, size in sizes.items():
                        case = {"held": held, "method": method, "workers": config.workers, "paths": paths}
                        yield rank.record("total_bytes", "B", max(0, size), rank=0, **case)
                rank.progress(done, len(groups), ", ".join(group))
    rank.barrier()


def in_processes(config: Config, methods: Sequence[str], paths: int) -> dict[str, dict[str, int]]:
    """Run `totals` for each method in a forked process; return the results by method."""
    fork = multiprocessing.get_context("fork")
    children = {}
    for method in methods:
        ours, theirs = fork.Pipe()
        child = fork.Process(target=totals, args=(config, method, paths, theirs))
        child.start()
        theirs.close()
        children[method] = child, ours
    try:
        found = {method: ours.recv() for method, (_, ours) in children.items()}
        for _, ours in children.values():
            ours.send("end")
        return found
    finally:
        for child, ours in children.values():
            ours.close()
            child.join()


def total_mb(records: Records) -> dict[str, dict[str, float]]:
    """Return {container: {method: MB}}."""
    found: dict[str, dict[str, float]] = {}
    for r in records.where("total_bytes"):
        found.setdefault(r.case["held"], {})[r.case["method"]] = r.value / 1e6
    return found


def category(records: Records) -> str:
    """Name the containers with the most and the least memory, by start method."""
    by = total_mb(records)
    methods = next(iter(by.values()))
    return "; ".join(f"{m}: {max(by, key=lambda h: by[h][m])}, {min(by, key=lambda h: by[h][m])}" for m in methods)


def answer(records: Records) -> Iterator[str]:
    """Yield MB of each case."""
    case = records.where("total_bytes")[0].case
    yield f"{case['paths']:,} paths, {case['workers']} workers: MB in all processes together."
    for held, by in total_mb(records).items():
        yield f"{held}: {', '.join(f'{method} {mb:.0f}' for method, mb in by.items())}."


if __name__ == "__main__":
    cli.main()
