"""A communication hook that counts what DDP exchanges.

DDP refuses hooks whose annotations are strings, so this module has no `from __future__ import annotations`.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from labs.common.tensors import nbytes


def counting_all_reduce(handed: Counter[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average over all ranks, as DDP does by default, and count "all_reduces" and their "bytes"."""
    handed["all_reduces"] += 1
    handed["bytes"] += nbytes(bucket.buffer())
    return default_hooks.allreduce_hook(None, bucket)
