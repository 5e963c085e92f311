"""A pipeline along the rows of a mesh, and the mean of gradients along its columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

Micro = list[tuple[Tensor, Tensor]]


def pipeline_step(
    stage: nn.Module, loss: Callable, micro: Micro, template: Tensor | None, pipe: dist.ProcessGroup
) -> None:
    """All micro-batches forward, then backward, through the stages of one copy of the model: one rank's share of it.

    The first stage reads the inputs, the last the targets. `template` is a tensor like what comes in from the stage
    before. The gradient in `stage` becomes that of the mean over the micro-batches.
    """
    me, last, kept = pipe.rank(), pipe.size() - 1, []
    for x, y in micro:
        if me > 0:
            x = torch.empty_like(template)
            dist.recv(x, group=pipe, group_src=me - 1)
            x.requires_grad_()
        out = stage(x)
        if me < last:
            dist.send(out.detach(), group=pipe, group_dst=me + 1)
        else:
            out = loss(out, y) / len(micro)
        kept.append((x, out))
    for x, out in kept:
        gradient = None
        if me < last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, group=pipe, group_src=me + 1)
        out.backward(gradient)
        if me > 0:
            dist.send(x.grad, group=pipe, group_dst=me - 1)


def average_gradients(module: nn.Module, copies: dist.ProcessGroup) -> None:
    """Mean over the copies of this part, as one message."""
    gradients = [p.grad for p in module.parameters()]
    whole = parameters_to_vector(gradients)
    dist.all_reduce(whole, group=copies)
    whole /= copies.size()
    for gradient, mean in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))
