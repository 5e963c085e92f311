"""What a number format does to the tensors that one model saves for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from labs.common.models import Workload
from labs.common.precision.amp import precision
from labs.kit._compat import TorchDispatchMode, to_copy


class _WeightCopies(TorchDispatchMode):
    """Notes the copies that autocast makes of `module`'s parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters = {_place(p) for p in module.parameters()}
        self.copies: dict[int, Tensor] = {}  # holds them, so that no other tensor gets their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is to_copy and _place(args[0]) in self.parameters:
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
