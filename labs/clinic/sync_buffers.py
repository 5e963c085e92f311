"""DDP's argument for buffers, under the name that this torch gives it."""

import inspect

from torch.nn.parallel import DistributedDataParallel

SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is the name before torch 2.13
    if name in inspect.signature(DistributedDataParallel).parameters
)
"""True, the default: rank 0's buffers, such as BatchNorm's statistics, are sent to all ranks before each forward."""
