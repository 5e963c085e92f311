"""Reference solutions of notebook 06."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Event = tuple[int, str, int, float, float]


def order(stage: int, stages: int, micro_batches: int, most: int) -> list[tuple[str, int]]:
    """1F1B with a limit: no more forwards ahead than until the first gradient can be back, or than may be kept."""
    warm_up = min(stages - stage, most, micro_batches)
    actions = [("forward", i) for i in range(warm_up)]
    for i in range(micro_batches):
        actions.append(("backward", i))
        if warm_up + i < micro_batches:
            actions.append(("forward", warm_up + i))
    return actions


def lost_time(events: Sequence[Event], stages: int) -> dict[str, float]:
    """Seconds of a step beyond the mean work of a stage: the uneven cut, messages, and the rest, which is waiting."""
    spent = {what: [0.0] * stages for what in ("work", "messages")}
    for stage, what, _, start, end in events:
        spent["work" if what in ("forward", "backward") else "messages"][stage] += end - start
    step = max(e[4] for e in events) - min(e[3] for e in events)
    mean = sum(spent["work"]) / stages
    cut, messages = max(spent["work"]) - mean, max(spent["messages"])
    return {"cut": cut, "messages": messages, "waiting": step - mean - cut - messages}


def sharded_linear(x: Tensor, shard: Tensor) -> Tensor:
    """x @ W.T, of whose rows each rank has a share; what is kept for backward is x and the share.

    One layer of FSDP: Zhao et al. 2023, arxiv.org/abs/2304.11277, section 3
    """
    n = dist.get_world_size()

    def gathered(shard: Tensor) -> Tensor:
        parts = [torch.empty_like(shard) for _ in range(n)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)

    class ShardedLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
            ctx.save_for_backward(x, shard)  # not the whole weight: it is freed here
            return x @ gathered(shard).T

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, shard = ctx.saved_tensors
            mine = torch.empty_like(shard)
            dist.reduce_scatter(mine, list((gradient.T @ x).chunk(n)))  # the ranks' sum, of these rows only
            return gradient @ gathered(shard), mine / n

    return ShardedLinear.apply(x, shard)
