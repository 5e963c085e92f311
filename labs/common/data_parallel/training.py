"""The training step that labs time alone and with DDP, and the small perceptron that some of them train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labs.common import models
from labs.kit.errors import require

PERCEPTRON = "perceptron"
"""What a lab's `model` is by default: the perceptron below, in place of one of labs.models.MODELS."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean over the rows of (output, target)."""


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, loss: Loss) -> None:
    """One training step: the same lines for one device and for DDP. What differs is `model`."""
    optimizer.zero_grad()
    loss(model(x), y).backward()  # DDP all-reduces the gradients meanwhile, bucket by bucket
    optimizer.step()  # exchanges nothing: after backward all ranks hold the same gradients


def perceptron(width: int, layers: int, *, batch_norm: bool = False) -> models.Workload:
    """Small equal layers, so that gradients become ready one after the other all through backward.

    A row is `width` random numbers, and so is its target. With `batch_norm` the layers have buffers, too.
    """

    def layer() -> nn.Module:
        norm = [nn.BatchNorm1d(width)] if batch_norm else []
        return nn.Sequential(nn.Linear(width, width), *norm, nn.ReLU())

    module = nn.Sequential(*[layer() for _ in range(layers)])
    return models.Workload(
        module, lambda rows: (torch.randn(rows, width), torch.randn(rows, width)), nn.functional.mse_loss
    )


def many_layers() -> models.Workload:
    """32 layers of 128, 2.1 MB of gradients: in small buckets what a hook costs for each adds up."""
    return perceptron(128, 32)


def require_model(config: Any) -> None:
    """BadInput unless `build` knows what to make of `config`'s model, width and layers, and of its batch_size."""
    for name in ("width", "layers", "batch_size"):
        require(getattr(config, name) >= 1, f"{name} must be at least 1, not {getattr(config, name)}")
    models.require_known(config.model, besides=[PERCEPTRON])


def build(config: Any, *, batch_norm: bool = False) -> models.Workload:
    """The perceptron, or another model that `config` names; the same for the same seed."""
    if config.model != PERCEPTRON:
        return models.build(config.model, config.seed)
    torch.manual_seed(config.seed)
    return perceptron(config.width, config.layers, batch_norm=batch_norm)
