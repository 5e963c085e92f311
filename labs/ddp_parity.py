"""Does DDP compute the same gradient as one process with the whole batch?

    python -m labs.ddp_parity
    torchrun --nproc-per-node 2 -m labs.ddp_parity --models my_package.module:factory

About 2 s on 2 CPU cores. Compares each model in FP32 and FP64: a difference that shrinks with the precision is
rounding, one that stays means another computation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.data_parallel.sync_batchnorm import synchronised
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """Which models to compare, on how much data."""

    models: tuple[str, ...] = ("mlp", "cnn", "cnn_batchnorm")
    """Keys of labs.models.MODELS, or package.module:factory."""
    dtypes: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
    """Number formats; float64 separates rounding from a real difference."""
    batch_size: int = 16
    """Samples per rank."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Has no effect: the run takes a second anyway."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 2, f"batch_size must be at least 2 (BatchNorm needs it), not {self.batch_size}")
        require(len(self.models) > 0, "models must name at least one model")
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if a model can't be built."""
    for name in config.models:
        models.build(name)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield relative gradient errors of every model and format; models with BatchNorm also run with SyncBatchNorm."""
    cases = [(name, dtype) for name in config.models for dtype in config.dtypes]
    for done, (name, dtype) in enumerate(cases, start=1):
        for synced in (False, True):
            module = models.build(name, config.seed).module
            if synced and not any(isinstance(m, nn.BatchNorm2d) for m in module.modules()):
                continue
            error = gradient_error(name, getattr(torch, dtype), synced, config, rank)
            norm = {"sync_batchnorm": synced}
            yield rank.record("gradient_relative_error", "1", error, model=name, dtype=dtype, **norm)
        rank.progress(done, len(cases), f"{name} {dtype}")


def gradient_error(name: str, dtype: torch.dtype, synced: bool, config: Config, rank: Rank) -> float:
    """Return ||g - G|| / ||G||: g from DDP with one shard per rank, G from one process with the whole batch."""
    workload = models.build(name, config.seed)
    whole_module = workload.module.to(rank.device, dtype)
    x, y = (_cast(t, rank.device, dtype) for t in workload.make_batch(config.batch_size * rank.world_size))
    shard = slice(rank.rank * config.batch_size, (rank.rank + 1) * config.batch_size)
    replica = copy.deepcopy(whole_module)
    ddp = DistributedDataParallel(synchronised(replica) if synced else replica)
    # TF32 convolutions alone would differ by 1e-3. Without `enabled=True`, flags() turns cuDNN off altogether.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        workload.loss(ddp(x[shard]), y[shard]).backward()
        workload.loss(whole_module(x), y).backward()
    g, whole = _flat(ddp.module), _flat(whole_module)
    return rank.slowest([((g - whole).norm() / whole.norm()).item()])[0]


def _cast(t: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return t.to(device, dtype) if t.is_floating_point() else t.to(device)


def _flat(module: nn.Module) -> Tensor:
    """Return all gradients as one vector."""
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def is_rounding(fp32: float, fp64: float) -> bool:
    """Return whether a relative error is rounding: if so, it shrinks from FP32 to FP64 with the unit roundoff.

    FP32's unit roundoff is 2^29 times larger, whatever the kernels; another computation differs equally in both
    formats. The threshold 2^14.5 is the geometric mean. An FP32 error below its unit roundoff, 2^-24, counts as 2^-24.
    """
    return fp64 * 2**14.5 <= max(fp32, 2**-24)


def errors(run: Records) -> Iterator[tuple[str, bool, float, float]]:
    """Yield (model, with SyncBatchNorm, relative error in FP32, in FP64) for each model run in both formats."""
    for r in run.where("gradient_relative_error", dtype="float64"):
        case = {k: v for k, v in r.case.items() if k != "dtype"}
        for other in run.where("gradient_relative_error", dtype="float32", **case):
            yield case["model"], case["sync_batchnorm"], other.value, r.value


def answer(run: Records) -> Iterator[str]:
    """Yield, for each model, whether it has the same gradient."""
    found = list(errors(run))
    if not found:
        yield "Run both FP32 and FP64 to separate rounding from a real difference: pass --dtypes float32 float64."
    for model, synced, fp32, fp64 in found:
        same = "same gradient as one process, up to rounding" if is_rounding(fp32, fp64) else "a different gradient"
        name = model + (" with SyncBatchNorm" if synced else "")
        yield f"{name}: {same}. Its relative error is {fp32:.1e} in FP32 and {fp64:.1e} in FP64."


if __name__ == "__main__":
    cli.main()
