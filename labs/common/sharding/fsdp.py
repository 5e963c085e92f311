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
    """Return the units that are gathered together: each block with parameters, and last the module with the rest."""
    try:
        found = [block for block in blocks(module) if any(True for _ in block.parameters())]
    except BadInput:  # no blocks: gather everything at once
        found = []
    return [*found, module]


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    reshard_after_forward: bool = True,
    lowered: torch.dtype | None = None,
) -> nn.Module:
    """Apply FSDP2 to each unit of `module`, from the inside out.

    `lowered` sets mixed precision: the format in which parameters are gathered and used, usually BF16. Each rank keeps
    its shard, and sums gradients, in FP32. The outermost unit always keeps its parameters after forward, because
    backward needs them at once.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=lowered, reduce_dtype=torch.float32 if lowered else None)
    for unit in units(module)[:-1]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def parameters_of_units(module: nn.Module) -> list[list[nn.Parameter]]:
    """Return each unit's parameters, without those of earlier units."""
    seen: set[int] = set()
    groups = []
    for unit in units(module):
        groups.append([p for p in unit.parameters() if id(p) not in seen])
        seen |= {id(p) for p in unit.parameters()}
    return groups


def shard_bytes(p: Tensor, ranks: int) -> int:
    """Return the bytes of one rank's shard of `p`: ceil(rows / n) rows. The last ranks send padding."""
    return -(-p.shape[0] // ranks) * nbytes(p) // p.shape[0]


def predict(module: nn.Module, way: str, ranks: int, gloo: bool = False) -> dict[str, float]:
    """Return the bytes that a rank sends in one step, by collective, and the parameter bytes that are whole at once.

    FSDP gathers each unit in forward, regathers units it didn't keep in backward, and reduce-scatters gradients.
    Without padding, that is 3/2 of DDP's bytes in FP32. In "fsdp, bf16", parameters travel in 2 bytes and gradients in
    4, which is as many bytes as DDP's. With `gloo`, a reduce-scatter sends as much as an all-reduce.
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
        whole = [p for p in self.module.parameters() if not hasattr(p, "full_tensor")]  # DTensors are shards
        self.most = max(self.most, nbytes(*whole))
        return func(*args, **(kwargs or {}))
