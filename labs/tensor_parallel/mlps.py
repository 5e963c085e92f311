"""A stack of perceptrons, and one training step of it in every way: alone, tensor parallel, DDP, pipeline."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from labs.common.pipelines import Chain, even_cuts
from labs.common.pipelines.engine import Pipeline
from labs.common.pipelines.schedules import one_f_one_b
from labs.common.sharding.blocks import Mlp
from labs.common.sharding.tensor import by_hand
from labs.kit.rank import Rank

MICRO_BATCHES = 4  # of the pipeline


def layers(rank: Rank) -> int:
    """Perceptrons that are timed: a pipeline needs one per stage."""
    return max(2, rank.world_size)


def perceptrons(width: int, rank: Rank) -> Chain:
    stack = [Mlp(width, 4 * width).to(rank.device) for _ in range(layers(rank))]
    return Chain("perceptrons", stack, lambda rows: torch.randn(2, rows, width).unbind(), nn.functional.mse_loss)


def steps(width: int, rows: int, seed: int, mesh: DeviceMesh, rank: Rank) -> dict[str, Callable[[], None]]:
    """A training step of each way, with the same batch; while one rank trains alone, the others wait."""
    torch.manual_seed(seed)
    model, shard = perceptrons(width, rank), slice(rank.rank, None, rank.world_size)
    x, y = (t.to(rank.device).requires_grad_(i == 0) for i, t in enumerate(model.make_batch(rows)))
    whole = model.module()
    return {
        "single": _step(copy.deepcopy(whole), x, y) if rank.rank == 0 else _wait,
        "tensor": _step(by_hand(copy.deepcopy(whole), mesh.get_group()), x, y),
        "ddp": _step(DistributedDataParallel(copy.deepcopy(whole)), x[shard].detach().requires_grad_(), y[shard]),
        "pipeline": _pipeline_step(model, x, y, rank),
    }


def _wait() -> None:
    """One rank trains alone; the others go to the next barrier."""


def _step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    return _trained(module, lambda: nn.functional.mse_loss(module(x), y).backward())


def _pipeline_step(model: Chain, x: Tensor, y: Tensor, rank: Rank) -> Callable[[], None]:
    pipeline = Pipeline(model, even_cuts(model, rank.world_size), rank)
    actions = one_f_one_b(rank.rank, rank.world_size, MICRO_BATCHES)
    inputs = [part.detach().requires_grad_() for part in x.chunk(MICRO_BATCHES)]
    return _trained(pipeline.module, lambda: pipeline.step(actions, inputs, y.chunk(MICRO_BATCHES)))


def _trained(module: nn.Module, backward: Callable[[], object]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return step
