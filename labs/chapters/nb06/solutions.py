"""Reference solutions of notebook 06."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from labs.chapters.nb06.exercise_pipeline import Link


def pipeline_step(
    stage: nn.Module,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    link: Link,
) -> float | None:
    """Forward and backward of one stage for a whole batch; the last stage returns the batch's mean loss.

    GPipe: all forwards, then all backwards. Huang et al. 2019, arxiv.org/abs/1811.06965
    """
    rows, kept, total = sum(len(x) for x, _ in micro_batches), [], None
    for x, y in micro_batches:
        if not link.first:
            x = link.receive_previous().requires_grad_()  # it has no history: its gradient is sent, not followed
        output = stage(x)
        if link.last:
            output = loss_fn(output, y) * len(x) / rows
            total = output.item() + (total or 0.0)
        else:
            link.send_next(output.detach())
        kept.append((x, output))
    while kept:
        x, output = kept.pop(0)  # gradients arrive in the order of the activations
        output.backward(None if link.last else link.receive_next())
        if not link.first:
            link.send_previous(x.grad)
    return total


def best_pipeline(work_s: float, stages: int, overhead_s: float, rows: int) -> tuple[int, float, float]:
    """(micro_batches, step_s, idle_share) of the fastest step: m + p - 1 turns of work_s / (p m) + overhead_s each."""

    def step_s(m: int) -> float:
        return (m + stages - 1) * (work_s / (stages * m) + overhead_s)

    least = math.sqrt((stages - 1) * work_s / (stages * overhead_s))  # where the derivative by m is zero
    near = {min(max(1, m), rows) for m in (math.floor(least), math.ceil(least))}
    m = min(near, key=step_s)
    return m, step_s(m), (stages - 1) / (m + stages - 1)


def cuts(layer_s: Sequence[float], stages: int) -> list[int]:
    """Where each stage but the first begins, so that the slowest stage is as fast as can be.

    Dynamic programming over "the best way to cut what is left from this layer on": layers^2 x stages steps.
    """
    layers = len(layer_s)
    until = [0.0]
    for seconds in layer_s:
        until.append(until[-1] + seconds)

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return until[layers] - until[first], ()
        found = []
        for end in range(first + 1, layers - stages + 2):  # one layer at least for every stage after this
            slowest, rest = best(end, stages - 1)
            found.append((max(until[end] - until[first], slowest), (end, *rest)))
        return min(found)

    return list(best(0, stages)[1])


def parallel_mlp(x: Tensor, up: nn.Linear, down: nn.Linear) -> Tensor:
    """down(relu(up(x))), of whose hidden features each rank computes its share; gradients land in up and down.

    The functions f and g of Megatron-LM: Shoeybi et al. 2019, arxiv.org/abs/1909.08053, section 3
    """

    class CopyToRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # every rank used x: its gradient is the sum of theirs
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    class SumOverRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: Tensor) -> Tensor:
            total = part.clone()
            dist.all_reduce(total)
            return total

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # d(a + b)/da = 1: nothing to send
            return gradient

    share = up.out_features // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    hidden = relu(linear(CopyToRanks.apply(x), up.weight[mine], up.bias[mine]))
    return SumOverRanks.apply(linear(hidden, down.weight[:, mine])) + down.bias
