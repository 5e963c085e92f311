"""At which bandwidth does training on several devices stop paying, for this model?

    python -m labs.slow_link                                    # launches its own ranks
    python -m labs.slow_link --model mlp --batch-size 64 --mb-s 800 400 200 100 50 25
    python -m labs.slow_link --sizes 1048576 4194304 16777216 --mb-s 500 200 50 10      # the formula at 16 points
    torchrun --nproc-per-node 2 -m labs.slow_link               # paces the real network between machines, too

About 12 s on 2 CPU cores. The wire is real: gloo's TCP connections, which the kernel is told to pace. At each bandwidth
  one all-reduce of the gradients is timed, and held against the ring's formula, which knows nothing of the pacing;
  one rank alone and all ranks with DDP train in turn, so that a slow spell of the machine hits both.
Where the kernel cannot pace (macOS), or with --delayed, hooks act the wire out by waiting, and the answer says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.communication import delay, wire
from labs.common.communication.wire import NO_PACE
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.training import train_step
from labs.common.sharding.link import timed
from labs.common.tensors import nbytes
from labs.kit import cli, measure
from labs.kit.errors import naming, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """What is trained, and over which wires."""

    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 64
    """Samples per rank; one rank alone takes as many."""
    mb_s: tuple[float, ...] = (400.0, 200.0, 100.0, 50.0, 25.0)
    """Bandwidths of the wire in each direction, in 10^6 byte/s, besides the wire as it is."""
    sizes: tuple[int, ...] = ()
    """Bytes of more vectors, whose all-reduce is held against the formula at each bandwidth, as the gradients' is."""
    delayed: bool = False
    """Act the wire out by hooks that wait, where the kernel could pace it, too. Always so where it cannot."""
    bucket_cap_mb: float = 25.0
    """Size of DDP's gradient buckets in MiB."""
    seconds: float = 10.0
    """Time for all bandwidths together, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds at each bandwidth; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Two bandwidths, few steps."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        with naming("mb_s"):
            wire.require_rates(self.mb_s)
        require(
            all(s >= 4 and s % 4 == 0 for s in self.sizes) and len(set(self.sizes)) == len(self.sizes),
            f"sizes must be different multiples of 4 bytes, not {self.sizes}",
        )
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        measure.require_budget(self.seconds, self.rounds)
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank."""
    wire.require_wire(world_size)


def predict_s(gradient_bytes: float, ranks: int, mb_s: float, latency_s: float = 0.0) -> float:
    """Seconds of a ring all-reduce on a wire of `mb_s` (10^6 byte/s): latency_s + 2 (n-1)/n S / bandwidth.

    Source: Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69 (2009).
    """
    return latency_s + ring_all_reduce_bytes(gradient_bytes, ranks) / (1e6 * mb_s)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The wire as it is, then every bandwidth: an all-reduce alone, and training with one rank and with all."""
    wire.require_tcp(rank)
    workload = models.build(config.model, config.seed)
    size = models.gradient_bytes(workload.module)
    vectors = {f"all_reduce {s}": torch.zeros(s // 4) for s in config.sizes} | {"all_reduce": torch.zeros(size // 4)}
    steps = {name: partial(delay.all_reduce, x) for name, x in vectors.items()} | _training(config, rank)
    for step in steps.values():  # also makes every connection: those that come later would not be paced
        rank.barrier()
        measure.time_steps(step, 2 if config.smoke else 5, rank.device)
    yield rank.record("gradient_bytes", "B", size)
    yield from wire.how(rank, config.delayed)
    latency_s = min(timed(partial(dist.all_reduce, torch.zeros(8)), 12, rank))
    yield rank.record("latency_s", "s", latency_s)
    wires = [NO_PACE, *sorted(config.mb_s, reverse=True)[: 1 if config.smoke else None]]
    for done, mb_s in enumerate(wires, start=1):
        seconds = wire.in_turn(steps, config, rank, 1 / len(wires), mb_s, delayed=config.delayed)
        for name, x in vectors.items():
            metric = "all_reduce_s" if name == "all_reduce" else "sized_all_reduce_s"
            if mb_s != NO_PACE:
                modelled = predict_s(nbytes(x), rank.world_size, mb_s, latency_s)
                yield rank.record(metric, "s", modelled, kind="modelled", mb_s=mb_s, size=nbytes(x))
            yield rank.record(metric, "s", seconds[name], mb_s=mb_s, size=nbytes(x))
        for way in ("single", "ddp"):
            yield rank.record("step_s", "s", seconds[way], way=way, mb_s=mb_s)
        rank.progress(done, len(wires), f"{mb_s:g} MB/s" if mb_s else "as it is")


def _training(config: Config, rank: Rank) -> dict[str, Callable[[], object]]:
    """A training step of rank 0 alone while the others wait, and one of all ranks with DDP."""
    found: dict[str, Callable[[], object]] = {}
    for way in ("single", "ddp"):
        workload = models.build(config.model, config.seed)
        module: nn.Module = workload.module
        if way == "ddp":
            module = DistributedDataParallel(module, bucket_cap_mb=config.bucket_cap_mb)
            if config.delayed or not wire.can_pace():
                delay.hold(module)
        x, y = workload.make_batch(config.batch_size)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        idle = way == "single" and rank.rank > 0
        found[way] = (lambda: None) if idle else partial(train_step, module, optimizer, x, y, workload.loss)
    return found


def speedups(run: Records) -> dict[float, measure.Estimate]:
    """{bandwidth in MB/s: samples/s of DDP on all ranks over those of one}; NO_PACE is the wire as it is."""
    ranks = run[0].layout["world_size"]
    found = {}
    for record in run.where("step_s", way="ddp"):
        alone = run.one("step_s", way="single", mb_s=record.case["mb_s"])
        found[record.case["mb_s"]] = measure.paired_ratio(alone.samples, record.samples).scaled(ranks)
    return found


def pays_from(run: Records) -> tuple[float, float]:
    """(largest bandwidth at which DDP is surely slower than one rank, smallest at which it is surely faster) in MB/s.

    0 and inf where there is none. The wire as it is does not count: its bandwidth is not known.
    """
    found = {mb_s: e for mb_s, e in speedups(run).items() if mb_s != NO_PACE}
    slower = max((mb_s for mb_s, e in found.items() if e.high < 1), default=0.0)
    return slower, min((mb_s for mb_s, e in found.items() if e.low > 1 and mb_s > slower), default=float("inf"))


@dataclass(frozen=True)
class Point:
    """An all-reduce over a wire of known speed, held against the formula."""

    mb_s: float
    size: int
    """Bytes of the vector."""
    formula_s: float
    error: measure.Estimate
    """Measured over the formula."""
    in_reach: bool
    """The wire was slowed to half of what an all-reduce of this size reaches without, or to less."""


def ring_points(run: Records) -> list[Point]:
    """Every all-reduce of the run over a wire of known speed."""
    ranks, found = run[0].layout["world_size"], []
    for metric in ("all_reduce_s", "sized_all_reduce_s"):
        measured = [r for r in run.where(metric) if r.kind != "modelled"]
        free = {r.case["size"]: r.value for r in measured if r.case["mb_s"] == NO_PACE}
        for r in run.where(metric):
            if r.kind == "modelled":
                mb_s, size = r.case["mb_s"], r.case["size"]
                [own] = [m for m in measured if (m.case["mb_s"], m.case["size"]) == (mb_s, size)]
                reaches = ring_all_reduce_bytes(size, ranks) / free[size] / 1e6 if size in free else float("inf")
                error = measure.estimate([s / r.value for s in own.samples], "x")
                found.append(Point(mb_s, size, r.value, error, mb_s <= reaches / 2))
    return found


NEAR = 0.1
"""Of the formula: how near the wire should be."""


def ring_text(run: Records) -> str:
    """How well the formula knows the wire, up to half of what it reaches as it is."""
    if run.where("acted_out"):
        return "The ring's formula is not tested: the emulated wire waits by it."
    points = [p for p in ring_points(run) if p.in_reach]
    if not points:
        return "No wire of this run is slower than half of what the wire reaches as it is: the formula is not tested."
    near = sum(abs(p.error.value - 1) <= NEAR for p in points)
    worst = max(points, key=lambda p: abs(p.error.value - 1))
    rates = [p.mb_s for p in points]
    return (
        f"Of {len(points)} all-reduces at {min(rates):g} to {max(rates):g} MB/s, up to half of what the wire "
        f"reaches as it is, {near} are within {100 * NEAR:.0f} % of the ring's formula; the furthest takes "
        f"{worst.error} of it, {worst.size / 1e6:.2g} MB at {worst.mb_s:g} MB/s."
    )


def pays_text(run: Records) -> str:
    """From which bandwidth on DDP pays, as far as the wires that were tried can tell."""
    slower, faster = pays_from(run)
    if slower and faster != float("inf"):
        return f"DDP pays from somewhere between {slower:g} and {faster:g} MB/s on"
    if slower:
        return f"DDP does not pay up to {slower:g} MB/s, and no faster wire of known bandwidth shows that it does"
    return f"DDP pays at {faster:g} MB/s already" if faster != float("inf") else "whether DDP pays cannot be told"


def answer(run: Records) -> Iterator[str]:
    """From where on splitting the batch pays, and how well the ring's formula knows the wire."""
    n, config = run[0].layout["world_size"], run[0].config
    yield from wire.label(run)
    yield f"{config['model']} with {config['batch_size']} samples per rank on {n} ranks: {pays_text(run)}."
    found = speedups(run)
    yield f"On the wire as it is, {n} ranks train {found[NO_PACE]} as many samples/s as one."
    yield ring_text(run)


if __name__ == "__main__":
    cli.main()
