"""Tensor parallelism by hand: each rank computes a part of every layer, and one sum combines the parts.

A half's first layers are split by columns (each rank has some features or heads), its last layer by rows (each rank has
the weights for its features). So a half needs one sum in forward, at its end, and one in backward, at its start:
functions g and f of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.common.sharding.blocks import Attention, Mlp, halves
from labs.kit.errors import require


class CopyToRanks(torch.autograd.Function):
    """f: every rank uses the same input, so the input's gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)  # not ours to modify
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """g: the output is the sum of the ranks' parts, so each part's gradient is the output's."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TensorParallel(nn.Module):
    """A rank's part of one half of a block. Every rank adds the last layer's bias once, after the sum."""

    def __init__(self, half: Mlp | Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        row, mine = getattr(half, half.ROW), share(half, group.rank(), group.size())
        for name in half.COLUMNS:
            column = getattr(half, name)
            setattr(half, name, linear(column.weight[mine], column.bias[mine]))
        setattr(half, half.ROW, linear(row.weight[:, mine], None))
        self.part, self.bias, self.group = half, row.bias, group

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to (..., width), equal on all ranks."""
        return SumOverRanks.apply(self.part(CopyToRanks.apply(x, self.group)), self.group) + self.bias


def share(half: Mlp | Attention, rank: int, ranks: int) -> slice:
    """Return `rank`'s features between first and last layer, in whole units; the first ranks have one more."""
    units = getattr(half, half.ROW).in_features // half.unit
    what = "heads" if isinstance(half, Attention) else "hidden features"
    require(ranks <= units, f"{units} {what} cannot be shared by {ranks} ranks: use at most {units}")
    begin = [r * (units // ranks) + min(r, units % ranks) for r in (rank, rank + 1)]
    return slice(begin[0] * half.unit, begin[1] * half.unit)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with copies of these parameters, shapes (outputs, inputs) and (outputs,)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def by_hand(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Replace every half in `module` by this rank's part; everything else stays whole on every rank."""
    for name in halves(module):
        if not name:  # the module itself is a half
            return TensorParallel(module, group)
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, TensorParallel(module.get_submodule(name), group))
    return module
