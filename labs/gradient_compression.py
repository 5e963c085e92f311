"""Does sending fewer bytes make training faster, and does the model learn as well?

    python -m labs.gradient_compression                         # bytes and times
    python -m labs.gradient_compression --parts loss
    torchrun --nproc-per-node 2 -m labs.gradient_compression --mb-s 50 10

About 10 s on 2 CPU cores. Each way to send gradients is one DDP communication hook:

  fp32       DDP's default all-reduce
  fp16       PyTorch's hook: half of the bytes
  powersgd   PyTorch's hook: each matrix as two thin ones
  top-k      the largest values with their indices, and error feedback

Parts: `bytes` counts what a rank sends per step; `time` interleaves the ways at each bandwidth; `loss` trains a smaller
model in each way from the same seeds. PowerSGD starts in step 2 of a timed run, and after 10 % of a training run's
steps. On GPUs the connection isn't slowed down.

DDP refuses hooks whose annotations are strings, so this module has no `from __future__ import annotations`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.communication import delay, wire
from labs.common.data import fashion_mnist
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.data_parallel.wire import sent_by
from labs.kit import cli, measure
from labs.kit.errors import naming, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

WAYS = ("fp32", "fp16", "powersgd", "top-k")
PARTS = ("bytes", "time", "loss")
ONE_BUCKET_MB = 10_000
"""PowerSGD over gloo needs one bucket: with two, ranks could run the collectives in different orders."""
MARGIN = 0.10
"""A way learns as well as FP32 if its loss is at most this share higher."""


@dataclass(frozen=True)
class Config:
    """What to measure, with which ways, over which connections."""

    parts: tuple[str, ...] = ("bytes", "time")
    """Any of bytes, time, loss."""
    model: str = "labs.gradient_compression:deep"
    """Model of `bytes` and `time`: one of labs.models.MODELS, package.module:factory, or a notebook's function."""
    batch_size: Annotated[int, Ge(1)] = 256
    """Samples per rank and step of `time`."""
    bucket_cap_mb: Annotated[float, Gt(0)] = 1.0
    """Size of DDP's buckets in MiB, for the ways that allow several."""
    mb_s: tuple[float, ...] = (400.0, 100.0, 25.0)
    """Bandwidths of the connection in each direction, in 10^6 byte/s."""
    powersgd_rank: Annotated[int, Ge(1)] = 4
    """Columns of PowerSGD's matrices."""
    share: Annotated[float, Gt(0), Lt(1)] = 0.01
    """Share of the values that top-k sends."""
    rounds: Annotated[int, Ge(6)] = 9
    """Number of rounds at each bandwidth; each way takes one turn per round."""
    seeds: Annotated[int, Ge(6)] = 9
    """Training runs with each way."""
    steps: Annotated[int, Ge(20)] = 60
    """Steps of a training run."""
    width: Annotated[int, Ge(1)] = 64
    """Width of the trained model's layers."""
    blocks: Annotated[int, Ge(0)] = 2
    """Blocks of the trained model."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """Use few steps, two bandwidths and two seeds."""

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        require(bool(self.parts) and not unknown, f"parts must be some of {', '.join(PARTS)}, not {self.parts}")
        with naming("mb_s"):
            wire.require_rates(self.mb_s)
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput for a single rank, or a model that can't be built."""
    wire.require_wire(world_size)
    models.build(config.model)


class Block(nn.Module):
    """A residual layer: (batch, width) -> (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the layer's output."""
        return x + self.layer(self.norm(x)).relu()


def deep(width: int = 256, blocks: int = 12) -> nn.Module:
    """Build many equal layers for Fashion-MNIST; 4.0 MB of gradients by default."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), *[Block(width) for _ in range(blocks)], nn.Linear(width, 10)
    )


@dataclass
class TopK:
    """What top-k carries over from step to step."""

    share: float
    unsent: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Unsent gradients by parameter, because DDP moves parameters to other buckets after its first step."""


def top_k(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send the largest values with their indices and keep the rest for the next step (a communication hook).

    Error feedback: Stich et al., NeurIPS 2018. The all-gathers block, so they can't overlap with backward.
    """
    gradient, ranks = bucket.buffer(), dist.get_world_size()
    views = bucket.gradients()  # views: writing to them writes to the buffer
    for p, view in zip(bucket.parameters(), views, strict=True):
        view += state.unsent.get(p, 0.0)
    places = gradient.abs().topk(max(1, round(state.share * len(gradient)))).indices
    values = gradient[places]
    rest = gradient.index_fill(0, places, 0.0).split([view.numel() for view in views])
    state.unsent.update((p, r.view_as(p)) for p, r in zip(bucket.parameters(), rest, strict=True))
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    all_places = [torch.empty_like(places, dtype=torch.int32) for _ in range(ranks)]
    dist.all_gather(all_values, values)  # 4 bytes per value to every other rank
    dist.all_gather(all_places, places.int())  # 4 bytes per index to every other rank
    mean = gradient.zero_().index_add_(0, torch.cat(all_places).long(), torch.cat(all_values) / ranks)
    done = torch.futures.Future[Tensor]()
    done.set_result(mean)
    return done


def wrap(module: nn.Module, way: str, config: Config, rank: Rank, powersgd_from: int = 2) -> DistributedDataParallel:
    """Wrap `module` in DDP with the hook of `way`. PowerSGD sends whole gradients before step `powersgd_from`."""
    one_bucket = way == "top-k" or (way == "powersgd" and "nccl" not in rank.backend)
    ddp = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB if one_bucket else config.bucket_cap_mb)
    state = {
        "powersgd": lambda: powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=config.powersgd_rank, start_powerSGD_iter=powersgd_from
        ),
        "top-k": lambda: TopK(config.share),
    }.get(way, lambda: None)()
    hooks = {"fp16": default_hooks.fp16_compress_hook, "powersgd": powerSGD_hook.powerSGD_hook, "top-k": top_k}
    if rank.device.type == "cpu" and not wire.can_pace():  # a hook waits as long as the slow connection would take
        plain = hooks.get(way, default_hooks.allreduce_hook)

        def sent(bucket: dist.GradBucket) -> float:
            return sent_bytes(way, [p.shape for p in bucket.parameters()], dist.get_world_size(), config)

        ddp.register_comm_hook(state, delay.holding(plain, sent))
    elif way in hooks:
        ddp.register_comm_hook(state, hooks[way])
    return ddp


def sent_bytes(way: str, shapes: list[torch.Size], ranks: int, config: Config) -> float:
    """Return the bytes that each of `ranks` ranks sends per step, by formula: a ring, for top-k an all-gather."""
    numbers = sum(shape.numel() for shape in shapes)
    if way == "top-k":
        return (ranks - 1) * 8 * round(config.share * numbers)
    if way == "powersgd":  # a matrix sends P (n x r) and Q (r x m) if they hold less than half of its values
        numbers = 0
        for shape in shapes:
            thin = config.powersgd_rank * (shape[0] + shape.numel() // shape[0])
            numbers += thin if len(shape) > 1 and 2 * thin < shape.numel() else shape.numel()
    return ring_all_reduce_bytes((2 if way == "fp16" else 4) * numbers, ranks)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Run the requested parts."""
    if rank.device.type == "cpu":
        yield from wire.how(rank)
    if "bytes" in config.parts or "time" in config.parts:
        steps = {way: training_step(way, config, rank) for way in WAYS}
        for step in steps.values():
            measure.time_steps(step, 4, rank.device)  # DDP has rebuilt its buckets, PowerSGD has started
        if "bytes" in config.parts:
            yield from count_bytes(steps, config, rank)
        if "time" in config.parts:
            yield from time_ways(steps, config, rank)
    if "loss" in config.parts:
        yield from losses(config, rank)


def training_step(way: str, config: Config, rank: Rank) -> Callable[[], None]:
    """Return a DDP training step that sends its gradients in this way."""
    workload = models.build(config.model, config.seed)
    model = wrap(workload.module.to(rank.device), way, config, rank)
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss = workload.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def count_bytes(steps: dict[str, Callable[[], None]], config: Config, rank: Rank) -> Iterator[Record]:
    """Yield a rank's bytes per step relative to FP32, counted by the kernel and by formula."""
    shapes = [p.shape for p in models.build(config.model).module.parameters()]
    plain = sent_bytes("fp32", shapes, rank.world_size, config)
    for way, step in steps.items():
        sent = sent_by(step, rank) if rank.device.type == "cpu" else None
        if sent is not None:
            yield rank.record("sent", "1", max(sent) / plain, way=way)
        formula = sent_bytes(way, shapes, rank.world_size, config) / plain
        yield rank.record("formula", "1", formula, kind="modelled", way=way)


def time_ways(steps: dict[str, Callable[[], None]], config: Config, rank: Rank) -> Iterator[Record]:
    """Yield seconds per step for each way and bandwidth."""
    cpu = rank.device.type == "cpu"
    wires = sorted(config.mb_s, reverse=True) if cpu else [wire.NO_PACE]
    for done, mb_s in enumerate(wires[:: max(1, len(wires) - 1)] if config.smoke and cpu else wires, start=1):
        with wire.slowed(rank, mb_s) if cpu else nullcontext():
            seconds = measure.interleave(steps, 2 if config.smoke else config.rounds, rank.device, between=rank.barrier)
        for way, samples in seconds.items():
            yield rank.record("step_s", "s", rank.slowest(samples), way=way, mb_s=mb_s)
        rank.progress(done, len(wires), f"{mb_s:g} MB/s")


def losses(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the loss on held-out images after equal training with each way, one sample per seed."""
    arrays = fashion_mnist()
    images, test = ((torch.tensor(x).to(rank.device) / 255).unsqueeze(1) for x in (arrays.x_train, arrays.x_test))
    labels, test_labels = (torch.tensor(y).long().to(rank.device) for y in (arrays.y_train, arrays.y_test))
    seeds = 2 if config.smoke else config.seeds
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(config.seed, config.seed + seeds):
        for way in WAYS:
            model = train(way, seed, images, labels, config, rank)
            with torch.no_grad():
                found[way].append(cross_entropy(model(test), test_labels).item())
        rank.progress(seed - config.seed + 1, seeds, f"seed {seed}")
    for way, samples in found.items():
        yield rank.record("loss", "1", samples, way=way)


def train(way: str, seed: int, images: Tensor, labels: Tensor, config: Config, rank: Rank) -> nn.Module:
    """Train a small deep model with batches of 64 per rank; return it, the same on all ranks."""
    torch.manual_seed(seed)
    steps = 20 if config.smoke else config.steps
    ddp = wrap(deep(config.width, config.blocks).to(rank.device), way, config, rank, powersgd_from=steps // 10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(images), (64 * rank.world_size,), generator=draw)[rank.rank :: rank.world_size]
        loss = cross_entropy(ddp(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ddp.module


def gains(records: Records, way: str) -> dict[float, measure.Estimate]:
    """Return {bandwidth in MB/s: how many times faster a step is than with FP32}."""
    return {
        r.case["mb_s"]: measure.paired_ratio(records.one("step_s", way="fp32", mb_s=r.case["mb_s"]).samples, r.samples)
        for r in records.where("step_s", way=way)
    }


def excess(records: Records, way: str) -> measure.Estimate:
    """Return the loss over FP32's, paired by seed."""
    return measure.paired_ratio(records.one("loss", way=way).samples, records.one("loss", way="fp32").samples)


def learns(ratio: measure.Estimate) -> str:
    """Judge a loss ratio's interval against 1 + MARGIN: "as well", "worse" or "inconclusive"."""
    return "as well" if ratio.high <= 1 + MARGIN else "worse" if ratio.low > 1 + MARGIN else "inconclusive"


def category(records: Records) -> str:
    """Say how each way learns; without losses, whether PowerSGD is faster than FP32 on the slowest link."""
    if records.where("loss"):
        return ", ".join(f"{way} {learns(excess(records, way))}" for way in WAYS[1:])
    found = gains(records, "powersgd")
    return measure.direction(found[min(found)])


def answer(records: Records) -> Iterator[str]:
    """Yield bytes, gains and losses of each way."""
    yield from wire.label(records)
    for way in WAYS[1:]:
        for metric, how in (("formula", "by formula"), ("sent", "by the kernel's count")):
            for r in records.where(metric, way=way):
                yield f"{way} sends {100 * r.value:.0f} % of FP32's bytes {how}."
        for mb_s, gain in gains(records, way).items():
            yield f"{way}: a step is {gain} as fast {f'at {mb_s:g} MB/s' if mb_s else 'on this link'}."
        if records.where("loss"):
            ratio = excess(records, way)
            yield f"{way}: the loss is {ratio} that of FP32, so it learns {learns(ratio)}."


if __name__ == "__main__":
    cli.main()
