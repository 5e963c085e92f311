"""How much memory does FSDP2 save, and how many more bytes does it send than DDP?

    python -m labs.fully_sharded      |      torchrun --nproc-per-node 2 -m labs.fully_sharded --batch-size 64

About 10 s on 2 CPU cores. Every rank trains with AdamW on its part of the batch, in each of these ways:

  ddp         every rank has all parameters, gradients and optimizer states
  fsdp        FSDP2: every rank has 1/n of each; a block's parameters are gathered for forward and again for backward
  fsdp, kept  the same, but parameters stay whole from forward to backward (reshard_after_forward=False)
  fsdp, bf16  parameters are gathered and used in BF16, stored in FP32; gradients are averaged in FP32
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.activation_memory.allocator import watch
from labs.common.models import Workload
from labs.common.sharding.fsdp import Gathered, predict, shard, shard_bytes
from labs.common.sharding.traffic import Traffic
from labs.common.tensors import nbytes
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

WAYS = ("ddp", "fsdp", "fsdp, kept", "fsdp, bf16")
STATES = {"parameters": 1, "gradients": 1, "optimizer": 2}  # numbers per parameter; AdamW keeps two moments


@dataclass(frozen=True)
class Config:
    """What to train and how long to measure."""

    model: str = "labs.common.sharding.blocks:row_transformer"
    """One of labs.models.MODELS, package.module:factory, or in a notebook a function that returns a module."""
    batch_size: Annotated[int, Ge(1)] = 8
    """Samples per rank and step."""
    rounds: Annotated[int, Ge(6)] = 6
    """Rounds on GPUs; DDP and FSDP2 take one turn per round."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run only two rounds."""

    def __post_init__(self) -> None:
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be built."""
    models.build(config.model)


@dataclass
class Trainer:
    """One way to train: its module, optimizer, and this rank's part of the batch."""

    workload: Workload
    module: nn.Module
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def forward(self) -> Tensor:
        """Clear the previous step's gradients and return the loss."""
        self.optimizer.zero_grad()
        return self.workload.loss(self.module(self.x), self.y)

    def finish(self, loss: Tensor) -> None:
        """Run backward and the optimizer step."""
        loss.backward()
        self.optimizer.step()

    def step(self) -> None:
        """Run one training step."""
        self.finish(self.forward())


def wrap(way: str, module: nn.Module, rank: Rank) -> nn.Module:
    """Return `module` wrapped as `way`, one of WAYS."""
    if way == "ddp":
        return DistributedDataParallel(module)
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    return shard(
        module,
        mesh,
        reshard_after_forward=way != "fsdp, kept",
        lowered=torch.bfloat16 if way == "fsdp, bf16" else None,
    )


def trainers(config: Config, rank: Rank, dtype: torch.dtype) -> dict[str, Trainer]:
    """Return a trainer for each way, and "single" with the whole batch. All start from the same parameters."""
    workload = models.build(config.model, config.seed)
    torch.manual_seed(config.seed + 1)
    n = config.batch_size
    x, y = (t.to(rank.device) for t in workload.make_batch(n * rank.world_size))
    x, y = (t.to(dtype) if t.is_floating_point() else t for t in (x, y))
    part = slice(rank.rank * n, (rank.rank + 1) * n)
    module = workload.module.to(rank.device, dtype)
    ways = {way: wrap(way, copy.deepcopy(module), rank) for way in WAYS if dtype == torch.float32 or "bf16" not in way}
    found = {way: Trainer(workload, wrapped, x[part], y[part]) for way, wrapped in ways.items()}
    return found | {"single": Trainer(workload, module, x, y)}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield FP64 parity with one process; bytes held, gathered and sent; peak memory; on GPUs also step times."""
    # FSDP returns views, and warns about in-place writes to them. Nothing here does that.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    yield from parity(trainers(config, rank, torch.float64), rank)
    found = trainers(config, rank, torch.float32)
    whole = found.pop("single").module
    for done, (way, trainer) in enumerate(found.items(), start=1):
        for _ in range(2):  # DDP rebuilds its buckets after the first backward
            trainer.step()
        yield from held(trainer, whole, way, rank)
        yield from moved(trainer, whole, way, rank)
        rank.progress(done, len(found) + 1, way)
    if rank.device.type == "cpu":
        return  # a step's time over gloo says nothing about GPUs
    steps = {way: found[way].step for way in ("ddp", "fsdp")}
    seconds = measure.interleave(steps, 2 if config.smoke else config.rounds, rank.device, between=rank.barrier)
    for way, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), way=way)


def parity(found: dict[str, Trainer], rank: Rank) -> Iterator[Record]:
    """Yield ||g - G|| / ||G||: g is the mean gradient over ranks, G that of one process with the whole batch.

    It compares gradients because Adam's step hides a wrong factor.
    """
    gradients = {}
    for way, trainer in found.items():
        trainer.forward().backward()
        gradients[way] = torch.cat([_whole(p.grad).flatten() for p in trainer.module.parameters()])
    single = gradients.pop("single")
    for way, gradient in gradients.items():
        error = ((gradient - single).norm() / single.norm()).item()
        yield rank.record("gradient_relative_error", "1", rank.slowest([error]), way=way)


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # this rank has only a shard of a DTensor


def _local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def held(trainer: Trainer, whole: nn.Module, way: str, rank: Rank) -> Iterator[Record]:
    """Yield bytes of each kind between two steps, and at a step's peak, on the rank that has the most."""
    parameters = list(trainer.module.parameters())
    states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]  # no counters
    tensors = {"parameters": parameters, "gradients": [p.grad for p in parameters], "optimizer": states}
    sizes = {what: nbytes(*map(_local, found)) for what, found in tensors.items()}
    share = sum(shard_bytes(p, 1 if way == "ddp" else rank.world_size) for p in whole.parameters())
    for what, size in sizes.items():
        yield rank.record("held_bytes", "B", max(rank.gather(size)), way=way, what=what)
        yield rank.record("held_bytes", "B", STATES[what] * share, kind="modelled", way=way, what=what)
    # The next step drops the old gradients first, so they count once.
    peak = sum(sizes.values()) + watch(trainer.forward, trainer.finish, rank.device).peak
    yield rank.record("peak_bytes", "B", max(rank.gather(peak)), way=way)


def moved(trainer: Trainer, whole: nn.Module, way: str, rank: Rank) -> Iterator[Record]:
    """Yield calls and bytes of one step's collectives, and the most parameter bytes that were whole at once."""
    with Traffic() as traffic, Gathered(trainer.module) as gathered:
        trainer.step()
    expected = predict(whole, way, rank.world_size)
    yield rank.record("gathered_bytes", "B", max(rank.gather(gathered.most)), way=way)
    yield rank.record("gathered_bytes", "B", expected.pop("gathered"), kind="modelled", way=way)
    for op, size in expected.items():
        yield rank.record("calls", "1", traffic.count()[op], way=way, op=op)
        yield rank.record("sent_bytes", "B", traffic.sent()[op], way=way, op=op)
        yield rank.record("sent_bytes", "B", size, kind="modelled", way=way, op=op)


def total(records: Records, metric: str, way: str) -> float:
    """Sum a metric's counted bytes over all kinds, for one way."""
    return sum(r.value for r in records.where(metric, way=way) if r.kind != "modelled")


def peak_share(records: Records) -> float:
    """Return FSDP2's peak memory over DDP's."""
    return total(records, "peak_bytes", "fsdp") / total(records, "peak_bytes", "ddp")


def category(records: Records) -> str:
    """Compare FSDP2's peak with DDP's: "at most 1/n", "less" or "no less"."""
    share, n = peak_share(records), records[0].layout["world_size"]
    return "at most 1/n" if share <= 1 / n else "less" if share < 1 else "no less"


def answer(records: Records) -> Iterator[str]:
    """Yield what FSDP2 holds and sends beside DDP, its step time, and whether gradients agree."""
    n = records[0].layout["world_size"]
    ddp, fsdp = (total(records, "held_bytes", way) / 1e6 for way in ("ddp", "fsdp"))
    yield f"Between two steps, each of {n} ranks holds {fsdp:.1f} MB of states with FSDP2 and {ddp:.1f} MB with DDP."
    yield f"At its peak, a step takes {peak_share(records):.0%} of DDP's memory."
    if sent := total(records, "sent_bytes", "ddp"):
        fp32, bf16 = (total(records, "sent_bytes", way) / sent for way in ("fsdp", "fsdp, bf16"))
        yield f"FSDP2 sends {fp32:.2f} times DDP's bytes in FP32, and {bf16:.2f} times with BF16 parameters."
    if records.where("step_s"):
        step = {way: records.one("step_s", way=way).samples for way in ("fsdp", "ddp")}
        yield f"A step takes {measure.paired_ratio(step['fsdp'], step['ddp'])} as long as with DDP."
    worst = max(r.value for r in records.where("gradient_relative_error"))
    yield f"In FP64, all gradients match one process within {worst:.0e}."


if __name__ == "__main__":
    cli.main()
