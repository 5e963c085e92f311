"""The training step that labs time alone and with DDP."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean over the rows of (output, target)."""


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, loss: Loss) -> None:
    """One training step: the same lines for one device and for DDP. What differs is `model`."""
    optimizer.zero_grad()
    loss(model(x), y).backward()  # DDP all-reduces the gradients meanwhile, bucket by bucket
    optimizer.step()  # exchanges nothing: after backward all ranks hold the same gradients
