"""Fully sharded training with FSDP2: what is gathered together, what each rank keeps, and what it sends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from labs.common.memory.recomputation import blocks
from labs.common.sharding.traffic import sent_bytes
from labs.common.tensors import nbytes
from labs.kit._compat import TorchDispatchMode
from labs.kit.errors import BadInput


def units(module: nn.Module) -> list[nn.Module]:
    """What is gathered together: each block that has parameters, and last the module with all the rest."""
    try:
        found = [block for block in blocks(module) if any(True for _ in block.parameters())]
    except BadInput:  # no blocks: all of it at once
        found = []
    return [*found, module]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    lowered: torch.dtype | None = None,
) -> nn.Module:
    """`module` with FSDP2 on each of its units, from the inside out.

    `lowered` is mixed precision: the format in which parameters are gathered and used, BF16 as a rule. Each rank keeps
    its shard, and sums gradients, in FP32. The outermost unit keeps its own parameters after forward in any case:
    backward would need them at once.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=lowered, reduce_dtype=torch.float32 if lowered else None)
    for unit in units(module)[:-1]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def parameters_of_units(module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each unit, those of earlier units left out, without units that have none left."""
    seen: set[int] = set()
    groups = []
    for unit in units(module):
        groups.append([p for p in unit.parameters() if id(p) not in seen])
        seen |= {id(p) for p in unit.parameters()}
    return groups


def shard_bytes(p: Tensor, ranks: int) -> int:
    """Bytes of one rank's shard of `p`: it has ceil(rows / n) rows. What the last ranks lack is sent as padding."""
    return -(-p.shape[0] // ranks) * nbytes(p) // p.shape[0]


def predict(module: nn.Module, way: str, ranks: int, gloo: bool = False) -> dict[str, float]:
    """Bytes that a rank sends in one step, by kind of collective, and bytes of parameters that are whole at once.

    FSDP gathers each unit in forward, those that it did not keep again in backward, and reduce-scatters gradients: with
    no padding that is 3/2 of DDP's bytes in FP32. In "fsdp, bf16" parameters travel in 2 bytes and gradients in 4: as
    many bytes as DDP's. With `gloo`, a reduce-scatter sends what an all-reduce does.
    """
    groups = [sum(shard_bytes(p, ranks) for p in group) * ranks for group in parameters_of_units(module)]
    plain = [nbytes(*group) for group in parameters_of_units(module)]
    if way == "ddp":
        return {"all_reduce": sent_bytes("all_reduce", sum(plain), ranks), "gathered": sum(plain)}
    kept, size = way == "fsdp, kept", 1 / 2 if way == "fsdp, bf16" else 1
    again = 0 if kept else sum(groups[:-1])
    return {
        "all_gather": sent_bytes("all_gather", (sum(groups) + again) * size, ranks),
        "reduce_scatter": sent_bytes("reduce_scatter", sum(groups), ranks, gloo),
        "gathered": sum(plain) if kept else (plain[-1] + max(plain[:-1], default=0)) * size,
    }


class Gathered(TorchDispatchMode):
    """Watches how many bytes of `module`'s parameters are whole on this rank: `most` at any operation."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.most = module, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        whole = [p for p in self.module.parameters() if not hasattr(p, "full_tensor")]  # a DTensor has: a shard
        self.most = max(self.most, nbytes(*whole))
        return func(*args, **(kwargs or {}))
