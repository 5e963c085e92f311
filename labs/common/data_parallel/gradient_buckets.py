"""DDP's buckets: which gradients travel together, and a communication hook that counts what is handed over.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from labs.common.tensors import nbytes


def bucket_bytes(module: nn.Module, bucket_cap_mb: float) -> list[int]:
    """Bytes of each bucket: gradients in backward order, a bucket is closed by the one that fills it.

    True from the second synchronised step on: the first goes in one bucket, while DDP learns the order.
    """
    buckets = [0]
    for p in reversed([p for p in module.parameters() if p.requires_grad]):
        if buckets[-1] >= bucket_cap_mb * 2**20:
            buckets.append(0)
        buckets[-1] += nbytes(p)
    return buckets


def counting_all_reduce(handed: Counter[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own default, an average over all ranks. Counts "all_reduces" and the "bytes" handed to them."""
    handed["all_reduces"] += 1
    handed["bytes"] += nbytes(bucket.buffer())
    return default_hooks.allreduce_hook(None, bucket)
