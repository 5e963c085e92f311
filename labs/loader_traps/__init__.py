"""What goes wrong with DataLoader workers, and what does it look like?

    python -m labs.loader_traps --nproc 1
    python -m labs.loader_traps --nproc 1 --traps failures --failures killed exits_with_0
    torchrun --nproc-per-node 1 -m labs.loader_traps --traps first_batch --start-methods fork forkserver spawn

About 12 s on 2 CPU cores. Rank 0 walks into each trap, the other ranks wait. Nothing here needs a GPU: workers read
and decode on the host, whatever the device is.
"""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

from labs.common.traps import failures as trap_failures
from labs.common.traps import shm as trap_shm
from labs.common.traps.datasets import Failure, Held, Source, no_worker_left, object_text, workers_now
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.loader_traps import seeds as trap_random
from labs.loader_traps import speed as trap_speed

Trap = Literal[
    "workers",
    "first_batch",
    "scaling",
    "random",
    "copy_on_write",
    "shm",
    "failures",
]
StartMethod = Literal["fork", "forkserver", "spawn"]
HELD: tuple[Held, ...] = ("list of str", "NumPy array", "list of int", "torch tensor")
SCALED = (0, 1, 2, 4, 8)
SMOKE = {
    "traps": ("workers", "first_batch", "shm", "failures"),
    "workers": 2,
    "failures": ("raises", "killed"),
}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Which traps, and how large they are."""

    traps: tuple[Trap, ...] = Trap.__args__
    """Traps to walk into."""
    workers: int = 4
    """Worker processes of the traps workers and random."""
    objects: int = 100_000
    """Python objects that the datasets of copy_on_write hold."""
    failures: tuple[Failure, ...] = ("raises", "unreadable_jpeg", "killed", "exits", "hangs")
    """Ways to fail; exits_with_0 takes torch 5 s longer to notice."""
    loader_timeout_s: float = 0.4
    """What DataLoader gets as timeout where a worker hangs; torch's default is to wait for ever."""
    hang_s: float = 0.8
    """How long the hanging worker hangs."""
    start_methods: tuple[StartMethod, ...] = ("fork", "spawn")
    """How first_batch starts workers; all but fork import torch once more, which takes seconds."""
    item_ms: float = 3.0
    """What an item of scaling takes, in sleep or on one core."""
    seconds: float = 3.5
    """Time for all rounds of scaling, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the loaders of scaling take turns; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """Fewer rounds and objects, only fork."""

    def __post_init__(self) -> None:
        require(1 <= self.workers <= 64, f"workers must be from 1 to 64, not {self.workers}")
        require(1000 <= self.objects <= 10**7, f"objects must be from 1000 to 10 million, not {self.objects}")
        timeout, longer = (
            "loader_timeout_s must be from 0.1 to 60",
            "hang_s must be above loader_timeout_s, at most 600",
        )
        require(0.1 <= self.loader_timeout_s <= 60, f"{timeout}, not {self.loader_timeout_s}")
        require(self.loader_timeout_s < self.hang_s <= 600, f"{longer}, not {self.hang_s}")
        require(0.1 <= self.item_ms <= 1000, f"item_ms must be from 0.1 to 1000, not {self.item_ms}")
        measure.require_budget(self.seconds, self.rounds, least=2)
        here = multiprocessing.get_all_start_methods()
        require(len(self.traps) > 0, f"traps must hold some of {', '.join(Trap.__args__)}")
        require(set(self.start_methods) <= set(here), f"start_methods here are {', '.join(here)}")


def predict(source: Literal["sleep", "compute"], workers: int, item_s: float, cores: int) -> float:
    """Items per second: every worker sleeps at the same time, but only `cores` of them compute.

    Without workers the trainer reads. What it costs to hand a batch over is left out, so this is a limit from above.
    """
    busy = max(1, workers)
    return (busy if source == "sleep" else min(busy, cores)) / item_s


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Trap by trap; no worker is left after any of them."""
    if rank.rank == 0:
        with unpinned(rank), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # the trap `start` is about it
            for done, trap in enumerate(config.traps, start=1):
                with no_worker_left():
                    yield from TRAPS[trap](config, rank)
                yield rank.record("processes_left", "processes", len(workers_now()), rank=0, trap=trap)
                rank.progress(done, len(config.traps), trap)
    rank.barrier()


def workers(config: Config, rank: Rank) -> Iterator[Record]:
    """(E05) Who reads: the trainer without workers, processes of their own with them. Memory by process."""
    for n in (0, config.workers):
        rows = trap_speed.processes(n, 4 * max(1, n))
        by_pid = {row[0]: row for row in rows}.values()
        mine, case = os.getpid(), {"trap": "workers", "workers": n}
        kind = {"trainer_reads": mine in {r[0] for r in rows}, "started_by_trainer": all(r[1] for r in rows)}
        yield rank.record("worker_pids", "pid", [r[0] for r in rows], rank=0, **case)
        yield rank.record("worker_processes", "processes", len(by_pid), rank=0, **case, **kind)
        yield rank.record("worker_threads", "threads", [r[2] for r in by_pid], rank=0, **case)
        yield rank.record("worker_private_bytes", "B", [r[3] for r in by_pid], rank=0, **case)
        yield rank.record("worker_resident_bytes", "B", [r[4] for r in by_pid], rank=0, **case)


def first_batch(config: Config, rank: Rank) -> Iterator[Record]:
    """(E08) The wait at the start of each of three epochs. Where torch is imported anew, with one worker only."""
    cases = [(0, "none", False)]
    for method in ("fork",) if config.smoke else config.start_methods:
        slow = method != "fork"
        cases += [(1 if slow else 2, method, persistent) for persistent in ((True,) if slow else (False, True))]
    for n, method, persistent in cases:
        with trap_speed.own_fork_server() if method == "forkserver" else nullcontext():
            seconds = trap_speed.first_batches(n, method, persistent)
        case = {"trap": "first_batch", "workers": n, "start_method": method, "persistent": persistent}
        yield rank.record("first_batch_s", "s", seconds, rank=0, **case)


def scaling(config: Config, rank: Rank) -> Iterator[Record]:
    """(E06, E08, A33) Items per second by number of workers, for items that sleep and for items that compute."""
    item_s, cores = config.item_ms / 1e3, _cores(rank)
    rounds = measure.rounds_of(config, part=0.5)
    for source, size in (("sleep", 0), ("compute", trap_speed.bytes_for(item_s))):
        limits = {n: predict(source, n, item_s, cores) for n in SCALED}
        sources = {n: Source(round(16 * item_s * limit), item_s, size) for n, limit in limits.items()}
        for n, samples in trap_speed.items_per_s(sources, 4, rounds).items():
            case = {"trap": "scaling", "source": source, "workers": n}
            yield rank.record("items_per_s", "1/s", samples, rank=0, **case)
            yield rank.record("predicted_items_per_s", "1/s", limits[n], kind="modelled", rank=0, **case)


def random(config: Config, rank: Rank) -> Iterator[Record]:
    """Draws that repeat across workers, from one epoch to the next, and across ranks."""
    n = config.workers
    for name, way in trap_random.WAYS.items():
        first, second = trap_random.epochs(way, n, seed=0)
        case = {"trap": "random", "way": name, "workers": n}
        shares = {"workers": trap_random.duplicate_share(first), "epochs": trap_random.repeated_share(first, second)}
        expected = {"workers": trap_random.expected_share(n) * way.workers_repeat, "epochs": float(way.epochs_repeat)}
        for across, share in shares.items():
            yield rank.record("duplicate_share", "1", share, rank=0, across=across, **case)
            yield rank.record("predicted_share", "1", expected[across], kind="modelled", rank=0, across=across, **case)
    for by_rank in (False, True):
        share = trap_random.ranks_share(n, 0, by_rank)
        way = "torch, generator seeded with the rank" if by_rank else "torch, all ranks seeded alike"
        yield rank.record("duplicate_share", "1", share, rank=0, across="ranks", trap="random", way=way, workers=n)


def copy_on_write(config: Config, rank: Rank) -> Iterator[Record]:
    """Private memory of a worker while it reads objects that it shares with the trainer, until it writes to them."""
    objects = min(config.objects, 20_000) if config.smoke else config.objects
    sizes = {"list of str": sys.getsizeof(object_text(0)), "list of int": sys.getsizeof(2**40)}
    for held in HELD:
        seen = trap_speed.private_bytes(held, objects)
        case = {"trap": "copy_on_write", "held": held, "objects": objects}
        yield rank.record("private_growth_bytes", "B", [b - seen[0] for b in seen], rank=0, **case)
        growth = trap_speed.copied_bytes(objects, sizes.get(held, 0))
        yield rank.record("predicted_growth_bytes", "B", growth, kind="modelled", rank=0, **case)


def shm(config: Config, rank: Rank) -> Iterator[Record]:
    """A worker with 4 MiB of shared memory. Skipped with one line where shared memory cannot be limited."""
    if not sys.platform.startswith("linux"):
        print("loader_traps: shm is skipped: only Linux lets a worker have less shared memory than the machine")
        return
    for setting in list(trap_shm.SETTINGS)[:2] if config.smoke else trap_shm.SETTINGS:
        found = trap_shm.small_shm(setting, config.loader_timeout_s)
        batches, seconds = found.pop("batches"), found.pop("seconds")
        most = trap_shm.in_flight_bytes(found.pop("workers"), found.pop("prefetch_factor"), found["batch_bytes"])
        sizes = {"limit_bytes": trap_shm.LIMIT_BYTES, "in_flight_bytes": most}
        case = {"trap": "shm", "setting": setting, **sizes, **found}
        yield rank.record("batches_received", "batches", batches, rank=0, **case)
        if found["error"] != "none":
            yield rank.record("seconds_until_error", "s", seconds, rank=0, **case)


def failures(config: Config, rank: Rank) -> Iterator[Record]:
    """What reaches the trainer and after how long, with torch alone and with labs.common.loading.named_items."""
    for how in config.failures:
        for named in (False, True):
            found = trap_failures.fail(how, named, 2, config.loader_timeout_s, config.hang_s)
            case = {"trap": "failures", "failure": how, "named": named}
            yield rank.record("seconds_until_error", "s", found.pop("seconds"), rank=0, **case, **found)


def _cores(rank: Rank) -> int:
    return len(rank.host_cores) or os.cpu_count() or 1


TRAPS: dict[str, Callable[[Config, Rank], Iterator[Record]]] = {
    "workers": workers,
    "first_batch": first_batch,
    "scaling": scaling,
    "random": random,
    "copy_on_write": copy_on_write,
    "shm": shm,
    "failures": failures,
}


def answer(run: Records) -> Iterator[str]:
    """What each trap that was tried showed, the dearest first."""
    for source in ("sleep", "compute"):
        rows = run.where("items_per_s", source=source)
        if rows:
            most = max(rows, key=lambda r: r.case["workers"])
            told = f"{most.case['workers']} workers over none, items that {source}"
            yield f"{measure.verdict(measure.paired_ratio(most.samples, rows[0].samples), told)}."
    alike = [r.case["way"] for r in run.where("duplicate_share") if r.value > 0]
    if len(run.where("duplicate_share")):
        yield f"Random numbers are drawn twice by: {'; '.join(dict.fromkeys(alike)) or 'none of the ways tried'}."
    grown = {r.case["held"]: r.samples[-1] / 1e6 for r in run.where("private_growth_bytes")}
    if grown:
        each = ", ".join(f"{held} {mb:.1f} MB" for held, mb in grown.items())
        yield f"What a forked worker gains by reading what it shares: {each}."
    slow, quick = (run.where("first_batch_s", start_method="fork", persistent=p) for p in (False, True))
    if slow and quick:
        later = [min(r[0].samples[1:]) * 1e3 for r in (slow, quick)]
        yield f"The first batch of a later epoch takes {later[0]:.0f} ms, {later[1]:.1f} ms with persistent_workers."
    unnamed = [r.case["failure"] for r in run.where("seconds_until_error", named=False) if not r.case["names_item"]]
    if unnamed:
        yield f"torch alone does not name the item when it fails by: {', '.join(unnamed)}."
    left = sum(r.value for r in run.where("processes_left"))
    yield f"{left:.0f} worker processes are left behind."
