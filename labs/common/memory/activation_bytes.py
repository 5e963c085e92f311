"""What one forward pass keeps for its backward pass: the memory that grows with the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from labs.common.models import Workload
from labs.common.tensors import nbytes


def activation_bytes(workload: Workload, x: Tensor, y: Tensor) -> int:
    """Return bytes of tensors that autograd saves in `loss(module(x), y)`, each counted once, without parameters.

    The input counts if the first layer needs it. Kernel workspace and tensors freed on the way don't, so this is what
    must fit, not the peak.
    """
    kept = {p.data_ptr(): 0 for p in workload.module.parameters()}

    def count(saved: Tensor) -> Tensor:
        kept.setdefault(saved.data_ptr(), nbytes(saved))
        return saved.detach()  # keeps it alive, or the next tensor could get the address of a freed one

    with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
        loss = workload.loss(workload.module(x), y)
    total = sum(kept.values())
    del loss
    return total
