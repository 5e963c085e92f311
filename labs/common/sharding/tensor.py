"""Tensor parallelism by hand: each rank computes a part of every layer, and one sum puts the parts together.

The first layers of a half are cut by columns (each rank has some of the features, or some of the heads), the last one
by rows (each rank has the weights for its own features). So a half needs one sum forward, at its end, and one sum
backward, at its start: the functions g and f of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.common.sharding.blocks import Attention, Mlp, halves
from labs.kit.errors import require


class CopyToRanks(torch.autograd.Function):
    """f: every rank uses the same input, so the input's gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)  # not ours to change
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """g: the output is the sum of the ranks' parts, so each part's gradient is that of the output."""

    @staticmethod
    def forward(ctx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TensorParallel(nn.Module):
    """A rank's part of one half of a block. The last layer's bias is added once, after the sum, on every rank."""

    def __init__(self, half: Mlp | Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        row, mine = getattr(half, half.ROW), share(half, group.rank(), group.size())
        for name in half.COLUMNS:
            column = getattr(half, name)
            setattr(half, name, linear(column.weight[mine], column.bias[mine]))
        setattr(half, half.ROW, linear(row.weight[:, mine], None))
        self.part, self.bias, self.group = half, row.bias, group

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width), equal on all ranks."""
        return SumOverRanks.apply(self.part(CopyToRanks.apply(x, self.group)), self.group) + self.bias


def share(half: Mlp | Attention, rank: int, ranks: int) -> slice:
    """The features between first and last layer that `rank` has: whole units; the first ranks have one more."""
    units = getattr(half, half.ROW).in_features // half.unit
    what = "heads" if isinstance(half, Attention) else "hidden features"
    require(ranks <= units, f"{units} {what} cannot be shared by {ranks} ranks: use at most {units}")
    begin = [r * (units // ranks) + min(r, units % ranks) for r in (rank, rank + 1)]
    return slice(begin[0] * half.unit, begin[1] * half.unit)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of these parameters, shapes (outputs, inputs) and (outputs,)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def by_hand(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """`module` with every half in it replaced by this rank's part; all else stays whole on every rank."""
    for name in halves(module):
        if not name:  # the module is a half itself
            return TensorParallel(module, group)
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, TensorParallel(module.get_submodule(name), group))
    return module
