"""BatchNorm over the batch of all ranks, written out for any device and backend.

`torch.nn.SyncBatchNorm` works only on GPUs. The idea here is the same: mean and variance are those of all ranks' rows,
and gradients flow through the all-reduce that computes them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _SumOverRanks(torch.autograd.Function):
    """A differentiable all-reduce: every output depends on every rank's input, so backward also sums over ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm2d whose training statistics come from every rank's (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of all ranks in training, with the running ones otherwise."""
        if not self.training:
            return super().forward(x)
        rows = torch.full_like(x[0, :1, 0, 0], x.numel() / x.shape[1])
        local = torch.cat([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), rows])
        total = _SumOverRanks.apply(local)
        n = total[-1]
        mean, square = total[:-1].div(n).chunk(2)
        variance = square - mean.square()
        self._update(mean.detach(), (variance * n / (n - 1)).detach())
        scale = self.weight * (variance + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]

    def _update(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased_variance, self.momentum)
        self.num_batches_tracked.add_(1)


def synchronised(module: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d in `module` by a synchronised one: torch's on GPUs, ours elsewhere."""
    if any(p.is_cuda for p in module.parameters()):
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.BatchNorm2d:
                new = SyncBatchNorm2d(child.num_features, child.eps, child.momentum).to(child.weight.dtype)
                new.load_state_dict(child.state_dict())
                setattr(parent, name, new)
    return module


__all__ = ["SyncBatchNorm2d", "synchronised"]
