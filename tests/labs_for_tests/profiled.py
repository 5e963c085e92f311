"""A model so small that what is planted into its step is nearly all of it."""

import torch
from torch import nn

from labs.models import Workload


def tiny() -> Workload:
    """A few operations, about a millisecond of a step."""
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return Workload(module, lambda n: (torch.randn(n, 16), torch.randint(4, (n,))), nn.functional.cross_entropy)
