"""Reference solution of exercise 08.1."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def two_levels(
    x: Tensor, inside: dist.ProcessGroup, across: dist.ProcessGroup, inside_b_s: float, across_b_s: float
) -> float:
    """Sum of `x` over all ranks, in place; returns the seconds that this should take."""
    k, m, size = inside.size(), across.size(), x.nbytes
    own = torch.empty_like(x[: len(x) // k])
    dist.reduce_scatter(own, list(x.clone().chunk(k)), group=inside)
    dist.all_reduce(own, group=across)
    dist.all_gather(list(x.chunk(k)), own, group=inside)  # the chunks are views: x itself is written
    return 2 * (k - 1) / k * size / inside_b_s + 2 * (m - 1) / m * size / across_b_s
