"""How much memory does a list of paths take in a training process and its workers together?

    python -m labs.loader_memory --nproc 1      |      python -m labs.loader_memory --nproc 1 --paths 1000000

About 12 s on 2 CPU cores. A process builds a data set of paths, starts workers by fork, forkserver or spawn, and lets
every worker read every path. What all of them hold is added up by PSS, which counts a page shared by n processes as
1/n in each, and the same without any paths is subtracted. Linux only.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
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


@dataclass(frozen=True)
class Config:
    """How many paths, held how, in how many workers."""

    paths: Annotated[int, Ge(1000), Le(10_000_000)] = 500_000
    """Paths of 36 ASCII characters."""
    workers: Annotated[int, Ge(1), Le(64)] = 2
    """num_workers."""
    held: tuple[Held, ...] = get_args(Held)
    """What holds the paths."""
    methods: tuple[Method, ...] = get_args(Method)
    """How workers are started."""
    smoke: bool = False
    """1,000 paths, by fork."""

    def __post_init__(self) -> None:
        require(bool(self.held and self.methods), "held and methods must each name something")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput where the kernel doesn't count shares of pages."""
    require(os.path.exists("/proc/self/smaps_rollup"), "this experiment needs Linux: only its kernel counts PSS")


def pss(pids: Iterable[int]) -> int:
    """Proportional set size of these processes together, in bytes."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += next(1024 * int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return total


def totals(config: Config, method: str, paths: int, answer: Connection) -> None:
    """Send bytes of the trainer and its workers, by what holds the paths, less those of a data set without paths."""
    sys.modules["__main__"] = ModuleType("__main__")  # or spawned workers would import the program that started us
    multiprocessing.set_forkserver_preload(["torch.utils.data", "labs.common.loading.paths"])
    found: dict[str, int] = {}
    alone: list[int] = []  # bytes of the trainer before each case but the first, which loads what all of them need
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
            left_over = alone[-1] - alone[0] if alone else 0  # by the cases before
            found[held] = pss({*workers, os.getpid()}) - left_over
        del data, loader, batches
    answer.send({held: size - found[NOTHING] for held, size in found.items() if held != NOTHING})


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each start method in a process of its own, which no other one has left anything to."""
    if rank.rank == 0:
        paths, methods = (1000, ("fork",)) if config.smoke else (config.paths, config.methods)
        with unpinned(rank):
            for done, method in enumerate(methods, start=1):
                for held, size in in_process(config, method, paths).items():
                    case = {"held": held, "method": method, "workers": config.workers, "paths": paths}
                    yield rank.record("total_bytes", "B", max(0, size), rank=0, **case)
                rank.progress(done, len(methods), method)
    rank.barrier()


def in_process(config: Config, method: str, paths: int) -> dict[str, int]:
    """`totals` of a forked process."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=totals, args=(config, method, paths, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join()


def total_mb(records: Records) -> dict[str, dict[str, float]]:
    """{held: {method: MB}}."""
    found: dict[str, dict[str, float]] = {}
    for r in records.where("total_bytes"):
        found.setdefault(r.case["held"], {})[r.case["method"]] = r.value / 1e6
    return found


def category(records: Records) -> str:
    """What takes the most and the least memory, by start method."""
    by = total_mb(records)
    methods = next(iter(by.values()))
    return "; ".join(f"{m}: {max(by, key=lambda h: by[h][m])}, {min(by, key=lambda h: by[h][m])}" for m in methods)


def answer(records: Records) -> Iterator[str]:
    """MB of each case."""
    case = records.where("total_bytes")[0].case
    yield f"{case['paths']:,} paths, {case['workers']} workers: MB in all processes together."
    for held, by in total_mb(records).items():
        yield f"{held}: {', '.join(f'{method} {mb:.0f}' for method, mb in by.items())}."


if __name__ == "__main__":
    cli.main()
