"""A perceptron whose parameters, gradients and AdamW state are spread over the ranks, for `sharded_checkpoint`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from labs.kit.rank import Rank
from labs.sharded_checkpoint import shards


def mesh(ranks: int, rank: Rank) -> DeviceMesh:
    """The first `ranks` ranks of the job; all ranks of it call this."""
    return DeviceMesh(rank.device.type, list(range(ranks)))


def make(width: int, layers: int, mesh: DeviceMesh | None, rank: Rank, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """A perceptron and AdamW, sharded over `mesh`; whole, without one, as on a single device."""
    torch.manual_seed(seed)
    module = nn.Sequential(*[nn.Linear(width, width, device=rank.device) for _ in range(layers)])
    if mesh is not None:
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
    return module, AdamW(module.parameters(), lr=1e-3)


def small(mesh: DeviceMesh | None, rank: Rank, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """A model for drills, after one step of training. Its width is odd: ranks hold unequal parts."""
    module, optimizer = make(61, 2, mesh, rank, seed)
    train_step(module, optimizer, torch.ones(4, 61, device=rank.device))
    return module, optimizer


def train_step(module: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    """One step of training; with a sharded module all its ranks take part."""
    optimizer.zero_grad()
    module(x).square().mean().backward()
    optimizer.step()


def whole(state: dict) -> dict[str, Tensor]:
    """Every tensor put together from all ranks that hold a part of it."""
    return {n: t.full_tensor() if isinstance(t, DTensor) else t.clone() for n, t in shards.tensors(state)}
