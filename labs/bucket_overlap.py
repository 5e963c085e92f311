"""How large should DDP's buckets be?

    python -m labs.bucket_overlap                               # launches its own ranks
    python -m labs.bucket_overlap --mb-s 50 --bucket-cap-mb 0.25 1 4 100
    torchrun --nproc-per-node 2 -m labs.bucket_overlap --model my_package.module:factory

About 12 s on 2 CPU cores. On a paced wire, where an all-reduce costs as much as on a slow network:
  buckets    a step for each bucket size, in turn with one under `no_sync`; the number of buckets, in the first step
             and after DDP has rearranged them, counted and by closed form; and the step that is predicted from when
             each gradient is ready without communication, how fast the wire is, and nothing else
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.communication import delay, wire
from labs.common.data_parallel.gradient_buckets import bucket_bytes
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.training import PERCEPTRON, build, require_model, train_step
from labs.common.sharding.link import as_in_training
from labs.common.tensors import nbytes
from labs.kit import cli, measure
from labs.kit.errors import naming, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """What is trained, over which wire, in which buckets."""

    model: str = PERCEPTRON
    """"perceptron": `layers` equal layers with BatchNorm; or one of labs.models.MODELS, or package.module:factory."""
    width: int = 256
    """Width of the perceptron's layers."""
    layers: int = 16
    """Layers of the perceptron."""
    batch_size: int = 256
    """Samples per rank."""
    mb_s: float = 200.0
    """Bandwidth of the wire in each direction, in 10^6 byte/s."""
    bucket_cap_mb: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 100.0)
    """Sizes of DDP's buckets to try, in MiB."""
    seconds: float = 9.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds in which every bucket size has its turn; by default as many as fit into `seconds`, least 6."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Two bucket sizes are timed, few steps."""

    def __post_init__(self) -> None:
        require_model(self)
        with naming("mb_s"):
            wire.require_rate(1e6 * self.mb_s)
        require(
            len(set(self.bucket_cap_mb)) == len(self.bucket_cap_mb) > 0,
            f"bucket_cap_mb must hold different sizes, not {self.bucket_cap_mb}",
        )
        require(min(self.bucket_cap_mb) > 0, f"bucket_cap_mb must be positive, not {min(self.bucket_cap_mb)}")
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank, or a model that cannot be built."""
    wire.require_wire(world_size)
    workload_of(config)


def predict(ready_s: Sequence[float], sizes: Sequence[int], ranks: int, mb_s: float, latency_s: float) -> float:
    """Seconds from the start of backward until every bucket is averaged.

    `ready_s[i]` is when the last gradient of bucket i is there, in the order in which DDP sends them, `sizes[i]` its
    bytes. The wire takes one bucket after the other, each as soon as it is ready and the wire is free:
    latency_s + 2 (n-1)/n bytes / bandwidth.
    """
    free_s = 0.0
    for ready, size in zip(ready_s, sizes, strict=True):
        free_s = max(ready, free_s) + latency_s + ring_all_reduce_bytes(size, ranks) / (1e6 * mb_s)
    return max(free_s, ready_s[-1])


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The gradients' moments, then the buckets."""
    wire.require_tcp(rank)
    yield from wire.how(rank)
    caps = sorted(config.bucket_cap_mb)
    yield from moments(config, rank)
    steps: dict[Any, Callable[[], object]] = {}
    for cap in caps:
        counts, steps[cap] = bucket_step(config, cap)
        for name, sizes in counts.items():  # "first", and "later" once DDP has rearranged
            yield rank.record("bucket_bytes", "B", sizes, bucket_cap_mb=cap, step=name)
        predicted = bucket_bytes(workload_of(config).module, cap)
        yield rank.record("bucket_bytes", "B", predicted, kind="modelled", bucket_cap_mb=cap, step="later")
    if config.smoke:
        steps = {cap: steps[cap] for cap in (caps[0], caps[-1])}
    steps["no_sync"] = ddp_step(config, 25.0, synchronise=False)
    measure.time_steps(steps["no_sync"], 3, rank.device)
    latency_s = statistics.median(rank.slowest(all_reduce_latency(rank)))
    yield rank.record("latency_s", "s", latency_s)
    for name, samples in wire.in_turn(steps, config, rank, mb_s=config.mb_s).items():
        case = {"synchronise": False} if name == "no_sync" else {"synchronise": True, "bucket_cap_mb": name}
        yield rank.record("step_s", "s", samples, mb_s=config.mb_s, **case)


def moments(config: Config, rank: Rank) -> Iterator[Record]:
    """When forward ends and each gradient is there, in s since the step began, without communication.

    One sample per parameter, of the slowest rank, in the order in which they become ready: the last layer's first.
    """
    workload = workload_of(config)
    x, y = workload.make_batch(config.batch_size)
    found: list[float] = []
    start = [0.0]
    for p in workload.module.parameters():
        p.register_post_accumulate_grad_hook(lambda _: found.append(time.perf_counter() - start[0]))
    rounds: list[list[float]] = []
    for _ in range(3 if config.smoke else 12):
        workload.module.zero_grad()
        rank.barrier()
        found.clear()
        start[0] = time.perf_counter()
        loss = workload.loss(workload.module(x), y)
        forward = time.perf_counter() - start[0]
        loss.backward()
        rounds.append(rank.slowest([forward, *found]))
    medians = [statistics.median(samples) for samples in zip(*rounds[2:] or rounds, strict=True)]
    yield rank.record("forward_s", "s", medians[0])
    yield rank.record("gradient_ready_s", "s", medians[1:])
    sizes = [nbytes(p) for p in reversed(list(workload.module.parameters()))]
    yield rank.record("gradient_bytes", "B", sizes)


def all_reduce_latency(rank: Rank) -> list[float]:
    """Seconds of an all-reduce of a few bytes, each after a millisecond of work: what any bucket costs at least."""
    tiny, before, seconds = torch.zeros(8), as_in_training(rank), []
    for _ in range(12):
        before()
        seconds += measure.time_steps(partial(dist.all_reduce, tiny), 1, rank.device)
    return seconds[2:]


def bucket_step(config: Config, cap_mb: float) -> tuple[dict[str, list[int]], Callable[[], object]]:
    """({"first": bytes of each bucket in the first step, "later": from the second on}, a step to be timed)."""
    seen: list[int] = []
    step = ddp_step(config, cap_mb, seen=seen)
    counts = {}
    for name in ("first", "later"):
        seen.clear()
        step()
        counts[name] = list(seen)
    return counts, step


def noting_all_reduce(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's default, an average over all ranks; notes the bytes of each bucket."""
    seen.append(nbytes(bucket.buffer()))
    return default_hooks.allreduce_hook(None, bucket)


def ddp_step(
    config: Config, cap_mb: float, *, synchronise: bool = True, seen: list[int] | None = None
) -> Callable[[], object]:
    """A training step with DDP and its buckets; under `no_sync` unless `synchronise`.

    `seen`, if given, is told the bytes of every bucket that is sent.
    """
    workload = workload_of(config)
    x, y = workload.make_batch(config.batch_size)
    ddp = DistributedDataParallel(workload.module, bucket_cap_mb=cap_mb)
    if seen is not None:
        ddp.register_comm_hook(seen, delay.holding(noting_all_reduce))
    elif not wire.can_pace():
        delay.hold(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # 0: under no_sync the ranks would drift apart
    step = train_step if synchronise else step_without_exchange
    return partial(step, ddp, optimizer, x, y, workload.loss)


def step_without_exchange(ddp: DistributedDataParallel, *arguments: Any) -> None:
    """The same step under `no_sync`: every rank keeps the gradients that are its own."""
    with ddp.no_sync():
        train_step(ddp, *arguments)


def workload_of(config: Config) -> models.Workload:
    """The model; the perceptron with BatchNorm."""
    return build(config, batch_norm=True)


def predicted_steps(run: Records) -> dict[float, float]:
    """{bucket size in MiB: predicted seconds of a step}: gradients' moments, the wire, and the optimizer's time.

    The time of a step without communication beyond its last gradient is the optimizer's, measured under `no_sync`.
    """
    ready, sizes = run.one("gradient_ready_s").samples, run.one("gradient_bytes").samples
    plain = run.one("step_s", synchronise=False)
    rest = max(0.0, plain.value - ready[-1])
    latency_s, ranks, mb_s = run.one("latency_s").value, plain.layout["world_size"], plain.case["mb_s"]
    found = {}
    for record in run.where("bucket_bytes", step="later"):
        if record.kind != "modelled":
            moments = _bucket_moments(ready, sizes, record.samples)
            found[record.case["bucket_cap_mb"]] = rest + predict(moments, record.samples, ranks, mb_s, latency_s)
    return found


def _bucket_moments(ready: Sequence[float], sizes: Sequence[float], buckets: Sequence[float]) -> list[float]:
    """When the last gradient of each bucket is there: gradients fill the buckets in the order of backward."""
    found, filled, bucket = [], 0.0, iter(buckets)
    wanted = next(bucket)
    for moment, size in zip(ready, sizes, strict=True):
        filled += size
        if filled >= wanted - 0.5:
            found.append(moment)
            filled, wanted = 0.0, next(bucket, float("inf"))
    return found


def best_worst(run: Records) -> tuple[float, float, measure.Estimate]:
    """(fastest bucket size in MiB, slowest, slowest over fastest paired round by round)."""
    found = {r.case["bucket_cap_mb"]: r for r in run.where("step_s", synchronise=True)}
    best, worst = (f(found, key=lambda cap: found[cap].value) for f in (min, max))
    return best, worst, measure.paired_ratio(found[worst].samples, found[best].samples)


def not_slower(run: Records) -> list[float]:
    """Bucket sizes in MiB that this run does not show to be slower than the fastest, paired round by round."""
    best, *_ = best_worst(run)
    samples = {r.case["bucket_cap_mb"]: r.samples for r in run.where("step_s", synchronise=True)}
    return sorted(cap for cap, s in samples.items() if measure.paired_ratio(s, samples[best]).low <= 1)


def best_text(run: Records) -> str:
    """Which bucket sizes may be best, told by those that are not where these are fewer."""
    best = not_slower(run)
    slower = sorted({r.case["bucket_cap_mb"] for r in run.where("step_s", synchronise=True)} - set(best))
    fewer = " or ".join(f"{cap:g}" for cap in min(best, slower, key=len))
    if len(slower) < len(best):
        return f"any buckets but those of {fewer} MiB may be best"
    return f"buckets of {fewer} MiB {'are' if len(best) == 1 else 'may be'} best"


def exposed(run: Records) -> dict[float, measure.Estimate]:
    """{bucket size in MiB: step(DDP) - step(no_sync), paired round by round, as a share of step(DDP) in %}."""
    plain = run.one("step_s", synchronise=False).samples
    return {
        r.case["bucket_cap_mb"]: measure.estimate(
            [100 * (a - b) / a for a, b in zip(r.samples, plain, strict=True)], "%"
        )
        for r in run.where("step_s", synchronise=True)
    }


def answer(run: Records) -> Iterator[str]:
    """Which buckets to take on this wire, and what the prediction would take."""
    yield from wire.label(run)
    best, worst, ratio = best_worst(run)
    mb_s = run.one("step_s", synchronise=False).case["mb_s"]
    if measure.differs(ratio):
        yield f"At {mb_s:g} MB/s {best_text(run)}; with {worst:g} MiB a step takes {ratio} as long."
    else:
        yield f"At {mb_s:g} MB/s the size of the buckets makes no difference that this run can show ({ratio})."
    predicted = predicted_steps(run)
    measured = run.one("step_s", synchronise=True, bucket_cap_mb=best).value
    yield (
        f"The prediction would take {min(predicted, key=predicted.get):g} MiB. For {best:g} MiB it says "
        f"{1e3 * predicted[best]:.3g} ms, measured are {1e3 * measured:.3g} ms."
    )


if __name__ == "__main__":
    cli.main()
