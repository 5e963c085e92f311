"""Above which bandwidth does splitting the batch pay off?

    python -m labs.slow_link                                    # the articles' MLP, in one bucket
    python -m labs.slow_link --model labs.gradient_compression:deep --bucket-cap-mb 1      # many layers, 5 buckets
    torchrun --nproc-per-node 2 -m labs.slow_link               # also paces a real network between machines

About 6 s on 2 CPU cores. The kernel slows gloo's TCP connections to each bandwidth. There, three steps take turns:

  single       rank 0 trains, the others wait
  no exchange  all ranks run DDP under no_sync
  ddp          all ranks run DDP

Before that, a step without exchange notes when each gradient bucket is full. A bucket can travel only after that
moment, and only the rest of backward can hide it. This gives a lower bound for DDP's step at each bandwidth. Where the
kernel can't pace connections (macOS), hooks wait as long as the ring's formula says, and the answer says so.

DDP refuses hooks whose annotations are strings, so this module has no `from __future__ import annotations`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.communication import delay, wire
from labs.common.communication.wire import NO_PACE
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.kit import cli, measure
from labs.kit.errors import naming
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

LATENCY_ROUNDS = 9


@dataclass(frozen=True)
class Config:
    """What to train, and over which connections."""

    model: str = "mlp"
    """One of labs.models.MODELS, package.module:factory, or in a notebook a function that returns a module."""
    batch_size: Annotated[int, Ge(1)] = 512
    """Samples per rank and step; a single rank uses the same number."""
    mb_s: tuple[float, ...] = (400.0, 200.0, 100.0, 50.0, 25.0)
    """Bandwidths of the connection in each direction, in 10^6 byte/s."""
    bucket_cap_mb: Annotated[float | None, Gt(0)] = None
    """Size of DDP's buckets in MiB. None: PyTorch's default, 1 MiB for the first and 25 MiB for the others."""
    rounds: Annotated[int, Ge(6)] = 9
    """Number of rounds at each bandwidth; each kind of step takes one turn per round."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Use every second bandwidth and few steps."""

    def __post_init__(self) -> None:
        with naming("mb_s"):
            wire.require_rates(self.mb_s)
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput for a single rank, or a model that can't be built."""
    wire.require_wire(world_size)
    models.build(config.model)


def exchange_s(size: float, ranks: int, mb_s: float, latency_s: float = 0.0) -> float:
    """Return seconds of a ring all-reduce of `size` bytes at `mb_s` (10^6 byte/s): latency + 2 (n-1)/n size /
    bandwidth.

    Source: Patarasuk and Yuan, Journal of Parallel and Distributed Computing 69 (2009).
    """
    return latency_s + ring_all_reduce_bytes(size, ranks) / (1e6 * mb_s)


def exposed_s(full_s: Sequence[float], exchanges_s: Sequence[float]) -> float:
    """Return how many seconds after the last gradient the exchange ends, at best.

    `full_s[i]` is when bucket i is full, `exchanges_s[i]` how long it travels. Buckets travel one after the other.
    """
    free = 0.0
    for full, exchange in zip(full_s, exchanges_s, strict=True):
        free = max(full, free) + exchange
    return max(0.0, free - full_s[-1])


@dataclass
class Moments:
    """When each bucket was full, in s since the step began, in the order of sending, and its bytes."""

    start: float = 0.0
    full_s: list[float] | None = None
    sizes: list[int] | None = None


def noting(moments: Moments, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Note when a bucket is full and send nothing (a communication hook)."""
    moments.full_s.append(time.perf_counter() - moments.start)
    moments.sizes.append(bucket.buffer().nbytes)
    done = torch.futures.Future[Tensor]()
    done.set_result(bucket.buffer())
    return done


def training_step(config: Config, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, Callable[[], None]]:
    """Return (model, training step). The learning rate is 0, or the ranks would drift apart under no_sync."""
    workload = models.build(config.model, config.seed)
    model = wrap(workload.module)
    x, y = workload.make_batch(config.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def step() -> None:
        loss = workload.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield when buckets are full; then, for every bandwidth, the three interleaved steps and two bounds."""
    wire.require_tcp(rank)
    yield from wire.how(rank)
    ddp = partial(DistributedDataParallel, bucket_cap_mb=config.bucket_cap_mb)
    model, step = training_step(config, ddp)
    if not wire.can_pace():
        model.register_comm_hook(None, delay.holding(allreduce_hook))
    _, alone = training_step(config, lambda module: module)

    def without_exchange() -> None:
        with model.no_sync():
            step()

    steps = {"single": alone if rank.rank == 0 else lambda: None, "no exchange": without_exchange, "ddp": step}
    for each in steps.values():
        measure.time_steps(each, 2 if config.smoke else 5, rank.device)
    full_s, sizes = bucket_moments(config, ddp, rank)
    size = models.gradient_bytes(model.module)
    gradients, tiny = torch.zeros(size // 4), torch.zeros(8)
    latency_s = min(time_all_reduces(tiny, rank))  # the minimum latency, since this is for a lower bound
    yield rank.record("gradient_bytes", "B", size)
    yield rank.record("bucket_bytes", "B", sizes)
    yield rank.record("bucket_full_s", "s", full_s)
    yield rank.record("latency_s", "s", latency_s)
    yield rank.record("all_reduce_s", "s", time_all_reduces(gradients, rank), mb_s=NO_PACE, size=size)
    wires = sorted(config.mb_s, reverse=True)
    wires = wires[::2] if config.smoke else wires
    plain_s: list[float] = []
    for done, mb_s in enumerate(wires, start=1):
        with wire.slowed(rank, mb_s):
            seconds = measure.interleave(steps, 2 if config.smoke else config.rounds, rank.device, between=rank.barrier)
        seconds = {way: rank.slowest(samples) for way, samples in seconds.items()}
        for way, samples in seconds.items():
            yield rank.record("step_s", "s", samples, way=way, mb_s=mb_s)
        plain_s.append(statistics.median(seconds["no exchange"]))
        rank.progress(done, len(wires), f"{mb_s:g} MB/s")
    for mb_s in wires:
        exchanges = [exchange_s(b, rank.world_size, mb_s, latency_s) for b in sizes]
        for bound, extra in (("nothing hidden", sum(exchanges)), ("backward hides", exposed_s(full_s, exchanges))):
            yield rank.record("bound_s", "s", min(plain_s) + extra, kind="modelled", bound=bound, mb_s=mb_s)


def bucket_moments(config: Config, ddp: Callable[[nn.Module], nn.Module], rank: Rank) -> tuple[list[float], list[int]]:
    """Return (when each bucket is full on the slowest rank, in s since the step began; bytes of each bucket)."""
    moments, found = Moments(), []
    model, step = training_step(config, ddp)
    model.register_comm_hook(moments, noting)
    for _ in range(4 if config.smoke else 12):
        rank.barrier()
        moments.full_s, moments.sizes, moments.start = [], [], time.perf_counter()
        step()
        found.append(rank.slowest(moments.full_s))
    kept = found[2:]  # DDP rebuilds its buckets after the first step
    return [statistics.median(times) for times in zip(*kept, strict=True)], moments.sizes


def time_all_reduces(x: Tensor, rank: Rank) -> list[float]:
    """Return seconds of one all-reduce over the unpaced connection, after a barrier."""
    steps = {"all-reduce": lambda: dist.all_reduce(x)}
    measure.time_steps(steps["all-reduce"], 2, rank.device)
    found = measure.interleave(steps, LATENCY_ROUNDS, rank.device, between=rank.barrier)
    return rank.slowest(found["all-reduce"])


def speedups(records: Records) -> dict[float, measure.Estimate]:
    """Return {bandwidth in MB/s: samples/s of DDP on all ranks over one rank's}."""
    ranks = records[0].layout["world_size"]
    found = {}
    for record in records.where("step_s", way="ddp"):
        alone = records.one("step_s", way="single", mb_s=record.case["mb_s"])
        found[record.case["mb_s"]] = measure.paired_ratio(alone.samples, record.samples).scaled(ranks)
    return found


def category(records: Records) -> str:
    """Say where splitting pays off: "above some" bandwidth, "at all" or "at none"; else "inconclusive"."""
    found = speedups(records)
    slow, fast = (measure.direction(found[pick(found)]) for pick in (min, max))
    kinds = {("slower", "faster"): "above some", ("faster", "faster"): "at all", ("slower", "slower"): "at none"}
    return kinds.get((slow, fast), "inconclusive")


def answer(records: Records) -> Iterator[str]:
    """Yield the speedup at each bandwidth, and the measured step's distance from the bound."""
    yield from wire.label(records)
    for mb_s, speedup in speedups(records).items():
        measured = statistics.median(records.one("step_s", way="ddp", mb_s=mb_s).samples)
        bound = records.one("bound_s", bound="backward hides", mb_s=mb_s).value
        yield (
            f"At {mb_s:g} MB/s DDP trains {speedup} as fast as one rank; its step takes {1e3 * measured:.3g} ms, "
            f"{100 * (measured / bound - 1):+.0f} % from the bound."
        )


if __name__ == "__main__":
    cli.main()
