"""FLOPs and bytes of a training step, counted without running it, and the speed that a device allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from labs.kit._compat import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from labs.common.models import Workload


@dataclass(frozen=True)
class Work:
    """Floating point operations, and bytes that cross the memory bus when nothing stays in a cache."""

    flop: float
    bytes: float
    operators: int = 0
    """Calls of operators that compute something (views do not): each costs the host time, whatever its size."""

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte."""
        return self.flop / self.bytes


def matmul_work(n: int, itemsize: int) -> Work:
    """Product of two n x n matrices: n^2 sums of n products; each matrix read or written once."""
    return Work(2 * n**3, 3 * n**2 * itemsize)


def attainable_flop_s(intensity: float, peak_flop_s: float, bandwidth_b_s: float) -> float:
    """The roofline: min(peak, intensity x bandwidth), with the intensity in FLOP per byte moved to memory.

    Source: Williams, Waterman, Patterson, "Roofline", Communications of the ACM 52(4), 2009.
    """
    return min(peak_flop_s, intensity * bandwidth_b_s)


def ridge_flop_per_byte(peak_flop_s: float, bandwidth_b_s: float) -> float:
    """The intensity at which the roof bends: below it memory limits, above it arithmetic."""
    return peak_flop_s / bandwidth_b_s


def count(step: Callable[[], Any]) -> Work:
    """FLOPs, bytes and operators of `step()`, which should work on meta tensors: then nothing is computed.

    FLOPs are those of matrix products and convolutions (torch.utils.flop_counter). Bytes are every operator's
    inputs and outputs once each: what eager execution moves if no tensor stays in a cache between operators.
    """
    traffic = _Traffic()
    with FlopCounterMode(display=False) as flops, traffic:
        step()
    return Work(flops.get_total_flops(), traffic.bytes, traffic.operators)


def training_step_work(workload: Workload, batch_size: int) -> Work:
    """`count` of one forward and backward pass of `workload` (no optimizer step), on the meta device."""
    x, y = (t.to("meta") for t in workload.make_batch(batch_size))
    module = workload.module.to("meta")
    return count(lambda: workload.loss(module(x), y).backward())


class _Traffic(TorchDispatchMode):
    """Counts operators and adds up the bytes that each reads and writes; views move nothing and do not count."""

    FREE = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith(self.FREE):
            read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values()
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            self.operators += 1
            self.bytes += sum(t.numel() * t.element_size() for t in (*read, *written))
        return out
