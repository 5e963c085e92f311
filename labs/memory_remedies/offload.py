"""What forward keeps for backward, kept in the host's memory: torch's `save_on_cpu`, and a stand-in where all is host.

On a GPU the memory that matters is the GPU's, and `save_on_cpu` moves it over PCIe. On a CPU it changes nothing: there
the stand-in copies to memory that torch's allocator knows nothing of, so that bytes and peak can be seen. The time of
its copies is that of this machine's memory, not of PCIe.
"""

from __future__ import annotations

import copy
import mmap
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from labs.common.models import Workload
from labs.kit._compat import FakeTensor


class Offloaded(nn.Module):
    """A module whose saved tensors wait for backward in the host's memory. `moved_bytes`: there, in all calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.moved_bytes = module, 0

    def forward(self, *inputs: Tensor) -> Any:
        """As the module's own."""
        with self._hooks(inputs[0]):
            return self.module(*inputs)

    def _hooks(self, x: Tensor) -> AbstractContextManager:
        if x.device.type == "cuda":
            return save_on_cpu(pin_memory=True)  # pinned, so that the copies need not wait for pageable memory
        return saved_tensors_hooks(self._out, _back)

    def _out(self, saved: Tensor) -> Any:
        self.moved_bytes += saved.nbytes  # parameters among them: save_on_cpu moves all that autograd saves
        if isinstance(saved, FakeTensor) or saved.numel() == 0:
            return saved.shape, saved.dtype  # nothing to copy: in a trace there are no numbers
        host = torch.frombuffer(mmap.mmap(-1, saved.nbytes), dtype=saved.dtype).view(saved.shape)
        return host.copy_(saved)


def _back(kept: Any) -> Tensor:
    return kept.clone() if isinstance(kept, Tensor) else torch.empty(kept[0], dtype=kept[1])


def offloaded(workload: Workload) -> Workload:
    """The same workload, with a copy of its module in an `Offloaded`."""
    return replace(workload, module=Offloaded(copy.deepcopy(workload.module)))
