"""The training step that labs time alone and with DDP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps (output, target) to the mean over rows."""


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, loss: Loss) -> None:
    """Run one training step: the same lines for one device and for DDP. Only `model` differs."""
    optimizer.zero_grad()
    loss(model(x), y).backward()  # here DDP all-reduces the gradients, bucket by bucket
    optimizer.step()  # no exchange: after backward all ranks hold the same gradients
