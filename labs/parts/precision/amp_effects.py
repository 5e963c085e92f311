"""What a number format does to one model's saved tensors, loss and gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from labs.kit.errors import require
from labs.parts.models import Workload
from labs.parts.precision.amp import precision, tf32

FIRST_SCALE = 65536.0  # GradScaler's init_scale
SCALES = (FIRST_SCALE, 4096.0, 256.0, 16.0, 1.0)


class _WeightCopies(TorchDispatchMode):
    """Notes the copies that autocast makes of `module`'s parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters = {_place(p) for p in module.parameters()}
        self.copies: dict[int, Tensor] = {}  # holds them, so that no other tensor gets their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _place(args[0]) in self.parameters:
            self.copies[_place(out)] = out
        return out


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def saved_bytes(workload: Workload, x: Tensor, y: Tensor, name: str) -> tuple[int, int]:
    """(all, weight copies): bytes that autograd keeps of a forward pass in format `name`, each storage once.

    Parameters do not count: they are there anyway. Their 16-bit copies by autocast do, where backward needs them;
    they cost the same whatever the batch, as activations do not.
    """
    kept: dict[int, int] = {}
    copies = _WeightCopies(workload.module)

    def count(saved: Tensor) -> Tensor:
        kept[_place(saved)] = saved.untyped_storage().nbytes()
        return saved.detach()  # must stay alive: the next tensor would get the address of a freed one

    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved), copies, precision(name, x.device):
        loss = workload.loss(workload.module(x), y)
    own = {place: size for place, size in kept.items() if place not in copies.parameters}
    del loss
    return sum(own.values()), sum(size for place, size in own.items() if place in copies.copies)


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Dropout layers pass everything through: different masks would hide what the format changes."""
    active = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.training]
    for m in active:
        m.eval()
    try:
        yield
    finally:
        for m in active:
            m.train()


def gradient(workload: Workload, x: Tensor, y: Tensor, name: str, scale: float = 1.0) -> tuple[float, Tensor]:
    """(loss, gradient of all parameters, flat, in FP32), the loss scaled by `scale` before backward and the gradient
    unscaled after it."""
    parameters = [p for p in workload.module.parameters() if p.requires_grad]
    with without_dropout(workload.module), precision(name, x.device):
        loss = workload.loss(workload.module(x), y)
    with tf32(name == "tf32"):
        found = torch.autograd.grad(loss.float() * scale, parameters, allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return loss.item(), torch.cat([g.flatten().float() for g in flat]) / scale


@dataclass(frozen=True)
class Agreement:
    """A format's loss and gradient against those of FP32 on the same batch and parameters."""

    loss_error: float
    """|loss - FP32's| / |FP32's|"""
    gradient_error: float
    """|gradient - FP32's| / |FP32's|, Euclidean norms"""
    underflow_share: float
    """Elements that are 0, of those that are not in FP32"""
    overflow_share: float
    """Elements that are infinite or not a number"""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers at all."""
        return self.loss_error < float("inf") and self.gradient_error < float("inf")  # false for NaN too


def agreement(found: tuple[float, Tensor], reference: tuple[float, Tensor]) -> Agreement:
    """Compare two (loss, flat gradient). BadInput if the reference has no gradient or no finite one."""
    (loss, g), (loss32, g32) = found, reference
    require(
        bool(g32.isfinite().all()) and abs(loss32) < float("inf"),
        f"the loss in FP32 is {loss32:g}, its gradient not finite: there is nothing to compare",
    )
    require(bool(g32.any()), "the gradient in FP32 is 0 everywhere: there is nothing to compare")
    return Agreement(
        loss_error=abs(loss - loss32) / max(abs(loss32), 1e-12),
        gradient_error=((g - g32).norm() / g32.norm()).item(),
        underflow_share=(g[g32 != 0] == 0).float().mean().item(),
        overflow_share=1 - g.isfinite().float().mean().item(),
    )


def fp16_agreements(
    workload: Workload, x: Tensor, y: Tensor, reference: tuple[float, Tensor]
) -> Iterator[tuple[float, Agreement]]:
    """(scale, agreement) of FP16 at GradScaler's first scale, then at smaller ones until nothing overflows."""
    for scale in SCALES:
        found = agreement(gradient(workload, x, y, "fp16", scale), reference)
        yield scale, found
        if found.finite:
            return
