"""How do you train with a batch that does not fit, and how does it go wrong without a crash?

    python -m labs.gradient_accumulation                        # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.gradient_accumulation --accumulate 8 --micro-batch 4

About 5 s on 2 CPU cores. effective batch = micro_batch x accumulate x world_size. Every way is compared with one
process that takes the effective batch at once:
  gradient   what the optimizer applied, summed over its steps: relative error, and length along the true one
  spread     how far apart the ranks' parameters are after the step, relative to the step
  traffic    all-reduces of one step and the bytes handed to them, counted by a communication hook

The wrong ways are in labs/gradient_accumulation/accumulation_mistakes.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from labs.common import models
from labs.common.data_parallel.gradient_buckets import bucket_bytes, counting_all_reduce
from labs.common.memory.activation_bytes import activation_bytes
from labs.gradient_accumulation import accumulation_mistakes as mistakes
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


def accumulate(
    ddp: DistributedDataParallel, optimizer: Optimizer, micro_batches: mistakes.MicroBatches, loss: mistakes.Loss
) -> None:
    """One optimizer step for all `micro_batches` of this rank, `(input, target)` each, with one synchronisation.

    `loss` is a mean over rows, so each micro-batch weighs by its share of rows; with m equal ones that is 1/m.
    DDP averages over ranks with equal weights: every rank must have the same number of rows in total.
    """
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():  # DDP looks in the forward pass: keep that inside too
            (loss(ddp(x), y) * len(x) / rows).backward()  # adds to .grad; the last one all-reduces the sum
    optimizer.step()


@dataclass(frozen=True)
class Way:
    """A way to do one optimizer step, and what is known of it before it runs."""

    step: Callable[..., None] = accumulate
    syncs: str = "once"
    """Backward passes that all-reduce: "once", "every" or "never"."""
    steps: str = "once"
    """Optimizer steps: "once" or "every"."""
    scale: str | None = "1"
    """Length of the gradient along the true one: "1", "m" or None where only a measurement can tell."""
    rows: str = "equal"
    """Rows of the micro-batches: "equal", "unequal" or "whole" (one micro-batch with everything)."""
    clipped: bool = False
    """Compare with the clipped gradient."""
    model: str | None = None
    """Model in place of the configured one."""


WAYS = {
    "whole_batch": Way(rows="whole"),
    "no_sync": Way(),
    "sync_every": Way(mistakes.sync_every, syncs="every"),
    "forward_outside": Way(mistakes.forward_outside, syncs="every"),
    "loss_not_divided": Way(mistakes.loss_not_divided, scale="m"),
    "mean_of_means": Way(mistakes.mean_of_means, scale=None, rows="unequal"),
    "last_in_no_sync": Way(mistakes.last_in_no_sync, syncs="never", scale=None),
    "zero_grad_inside": Way(mistakes.zero_grad_inside, scale=None),
    "step_inside": Way(mistakes.step_inside, steps="every", scale=None),
    "clip_inside": Way(mistakes.clip_inside, scale=None, clipped=True),
    "batchnorm": Way(scale=None, model="cnn_batchnorm"),
}
SAME, SPREAD = 1e-5, 1e-3
"""Relative error below which a gradient is the same, rounded, in FP32; spread from which replicas drift apart."""
TIMED = ("whole_batch", "no_sync", "sync_every")


@dataclass(frozen=True)
class Config:
    """What to train, and how the batch is cut."""

    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    micro_batch: int = 16
    """Samples of one forward pass on one rank: what fits."""
    accumulate: int = 4
    """Micro-batches per optimizer step, m."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Ways to do a step: "no_sync" is the right one, see WAYS and accumulation_mistakes.py."""
    seconds: float = 1.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that every timed way takes its turn; by default as many as fit into `seconds`, at least 6."""
    bucket_cap_mb: float = 0.25
    """Size of DDP's gradient buckets in MiB; torch's default of 25 would make one bucket of a model this small."""
    dtype: Literal["float32", "float64"] = "float32"
    """Numbers of the comparison, not of the timing; float64 tells rounding from a mistake."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Only a few steps, to see that it runs."""

    def __post_init__(self) -> None:
        require(self.micro_batch >= 2, f"micro_batch must be at least 2, not {self.micro_batch}")
        require(self.accumulate >= 2, f"accumulate must be at least 2, not {self.accumulate}: 1 is no accumulation")
        measure.require_budget(self.seconds, self.rounds)
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        require(len(self.ways) > 0, f"ways must name at least one of {', '.join(WAYS)}")
        for way in self.ways:
            require(way in WAYS, f"there is no way {way!r}: the ways are {', '.join(WAYS)}")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built."""
    models.build(config.model)


@dataclass(frozen=True)
class Traffic:
    """What one optimizer step is expected to do on each rank; `bytes` are those handed to the all-reduces."""

    all_reduces: int
    bytes: int
    optimizer_steps: int
    gradient_scale: float | None


def predict(config: Config) -> dict[str, Traffic]:
    """Traffic and gradient scale of every way, by closed form: b buckets of S bytes in all, once or m times."""
    m, expected = config.accumulate, {}
    for name in config.ways:
        way = WAYS[name]
        module = models.build(way.model or config.model).module.to(getattr(torch, config.dtype))
        buckets = bucket_bytes(module, config.bucket_cap_mb)
        times = {"once": 1, "every": m, "never": 0}[way.syncs]
        scale = {"1": 1.0, "m": float(m), None: None}[way.scale]
        expected[name] = Traffic(times * len(buckets), times * sum(buckets), m if way.steps == "every" else 1, scale)
    return expected


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Gradient, spread and traffic of every way; memory of activations; step times, interleaved."""
    for name in config.ways:
        yield from _compare(name, config, rank)
    timed = {way: _Trial(way, config, rank) for way in TIMED if way in config.ways}
    for way, trial in timed.items():
        measure.time_steps(trial.step, 2 if config.smoke else 5, rank.device)
        if way != "sync_every":  # as no_sync
            yield rank.record("activation_bytes", "B", trial.activation_bytes(), way=way)
    rounds = measure.rounds_of(config, rank.slowest)
    seconds = measure.interleave(
        {way: trial.step for way, trial in timed.items()},
        rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    effective = config.micro_batch * config.accumulate * rank.world_size
    for way, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), way=way, effective_batch=effective)


class _Trial:
    """This rank's model, optimizer and micro-batches for one way, with its traffic counted."""

    def __init__(self, way: str, config: Config, rank: Rank, dtype: torch.dtype = torch.float32) -> None:
        self.way, self.traffic = WAYS[way], Counter()
        self.workload = models.build(self.way.model or config.model, config.seed)
        self.module = self.workload.module.to(rank.device, dtype)
        rows = config.micro_batch * config.accumulate
        self.whole = [t.to(rank.device) for t in self.workload.make_batch(rows * rank.world_size)]
        self.whole[0] = self.whole[0].to(dtype) if self.whole[0].is_floating_point() else self.whole[0]
        mine = [t[rank.rank * rows : (rank.rank + 1) * rows] for t in self.whole]
        self.micro_batches = list(zip(*(t.split(_sizes(self.way.rows, config)) for t in mine), strict=True))
        self.ddp = DistributedDataParallel(copy.deepcopy(self.module), bucket_cap_mb=config.bucket_cap_mb)
        self.ddp.register_comm_hook(self.traffic, counting_all_reduce)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)

    def step(self) -> None:
        """One optimizer step, this way."""
        self.way.step(self.ddp, self.optimizer, self.micro_batches, self.workload.loss)

    def activation_bytes(self) -> int:
        """Bytes that one forward pass keeps for its backward pass, without the parameters."""
        return activation_bytes(self.workload, *self.micro_batches[0])


def _sizes(rows: str, config: Config) -> list[int]:
    """Rows of each micro-batch; unequal: half of the last one's rows are in the first one instead."""
    sizes, moved = [config.micro_batch] * config.accumulate, config.micro_batch // 2
    if rows == "unequal":
        sizes[0], sizes[-1] = sizes[0] + moved, sizes[-1] - moved
    return [sum(sizes)] if rows == "whole" else sizes


def _compare(name: str, config: Config, rank: Rank) -> Iterator[Record]:
    """One step, this way, against one process with the whole batch, without TF32."""
    trial = _Trial(name, config, rank, getattr(torch, config.dtype))
    applied: list[Tensor] = []  # seen by the optimizer: what .grad holds afterwards may be only a part of it
    trial.optimizer.register_step_pre_hook(lambda *_: applied.append(_gradient(trial.ddp.module)))
    before = nn.utils.parameters_to_vector(trial.module.parameters()).detach()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # by itself flags() would turn cuDNN off
        trial.workload.loss(trial.ddp(trial.micro_batches[0][0]), trial.micro_batches[0][1]).backward()
        trial.traffic.clear()  # that was DDP's first step, in one bucket
        trial.step()
        trial.workload.loss(trial.module(trial.whole[0]), trial.whole[1]).backward()
    g, whole = sum(applied), _gradient(trial.module)
    whole = mistakes.clipped(whole) if trial.way.clipped else whole
    after = nn.utils.parameters_to_vector(trial.ddp.parameters()).detach()
    error, scale = (g - whole).norm() / whole.norm(), g @ whole / (whole @ whole)
    spread = _spread(after) / (after - before).norm()
    worst = rank.slowest([error.item(), scale.item(), spread.item()])  # the rank that is furthest off
    yield rank.record("gradient_relative_error", "1", worst[0], way=name)
    yield rank.record("gradient_scale", "1", worst[1], way=name)
    yield rank.record("parameter_spread", "1", worst[2], way=name)
    yield rank.record("optimizer_steps", "1", len(applied), way=name)
    yield rank.record("all_reduces_per_step", "1", trial.traffic["all_reduces"], way=name)
    yield rank.record("bytes_per_step", "B", trial.traffic["bytes"], way=name)


def _gradient(module: nn.Module) -> Tensor:
    """All gradients as one new vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def _spread(parameters: Tensor) -> Tensor:
    """Norm of the largest difference between ranks, element by element."""
    highest, lowest = parameters.clone(), parameters.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return (highest - lowest).norm()


def answer(run: Records) -> Iterator[str]:
    """What no_sync gains, what micro-batches save, and which ways give another gradient."""
    step = {r.case["way"]: r for r in run.where("step_s")}
    if {"no_sync", "sync_every"} <= set(step) and run[0].layout["world_size"] > 1:
        gain = measure.paired_ratio(step["sync_every"].samples, step["no_sync"].samples)
        yield measure.verdict(gain, "A step with no_sync, over one that all-reduces every micro-batch") + "."
    kept = {r.case["way"]: r.value for r in run.where("activation_bytes")}
    if {"whole_batch", "no_sync"} <= set(kept):
        yield f"Activations take {kept['no_sync'] / 1e3:.0f} kB in place of {kept['whole_batch'] / 1e3:.0f} kB."
    error = {r.case["way"]: r.value for r in run.where("gradient_relative_error")}
    apart = {r.case["way"] for r in run.where("parameter_spread") if r.value >= SPREAD}
    right = [way for way, value in error.items() if value < SAME and way not in apart]
    wrong = [
        f"{way} ({error[way]:.0%} off{', ranks apart' if way in apart else ''})" for way in error if way not in right
    ]
    yield f"The gradient of the whole batch: {', '.join(right) or 'none'}. Another one: {', '.join(wrong) or 'none'}."
