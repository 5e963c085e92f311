"""A communication hook that counts what DDP hands over.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from labs.common.tensors import nbytes


def counting_all_reduce(handed: Counter[str], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own default, an average over all ranks. Counts "all_reduces" and the "bytes" handed to them."""
    handed["all_reduces"] += 1
    handed["bytes"] += nbytes(bucket.buffer())
    return default_hooks.allreduce_hook(None, bucket)
