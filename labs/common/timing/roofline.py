"""FLOPs and bytes of a training pass, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labs.kit._compat import TorchDispatchMode, tree_leaves

if TYPE_CHECKING:
    from labs.common.models import Workload


@dataclass(frozen=True)
class Work:
    """Floating point operations, and bytes that cross the memory bus if nothing stays in a cache."""

    flop: float
    bytes: float
    operators: int = 0
    """Calls of operators that compute something (not views): each costs host time, whatever its size."""


def matmul_work(n: int, itemsize: int) -> Work:
    """Return the work of an n x n matrix product: n^2 sums of n products; each matrix is read or written once."""
    return Work(2 * n**3, 3 * n**2 * itemsize)


@dataclass(frozen=True)
class Operator:
    """One call of an operator: its name, FLOPs, and the bytes of its inputs and outputs."""

    name: str
    flop: float
    bytes: float


def operators(step: Callable[[], Any]) -> list[Operator]:
    """Run `step` and return every operator that it calls, in order, on this device and code path.

    FLOPs are those of matrix products, convolutions and attention (torch.utils.flop_counter). Bytes are an operator's
    inputs and outputs once each: what eager execution moves if no tensor stays in a cache. Views are left out.
    """
    seen = _Operators()
    with seen:
        step()
    return seen.calls


def count(step: Callable[[], Any]) -> Work:
    """Add up FLOPs, bytes and operators of `step()`. On meta tensors nothing is computed."""
    calls = operators(step)
    return Work(sum(c.flop for c in calls), sum(c.bytes for c in calls), len(calls))


def training_step_work(workload: Workload, batch_size: int, device: str | torch.device = "meta") -> Work:
    """Return `count` of one forward and backward pass of `workload` (no optimizer step).

    On the meta device nothing runs, but attention isn't one fused operator there, so bytes and operators are too high.
    """
    x, y = (t.to(device) for t in workload.make_batch(batch_size))
    module = workload.module.to(device)
    return count(lambda: workload.loss(module(x), y).backward())


class _Operators(TorchDispatchMode):
    """Records each operator that computes something; views move nothing, and empty tensors aren't written."""

    FREE = ("aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Operator] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.name().startswith(self.FREE):
            read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}.values()
            written = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            moved = sum(t.numel() * t.element_size() for t in (*read, *written))
            self.calls.append(Operator(func.name().removeprefix("aten::"), _flop(func, args, kwargs or {}, out), moved))
        return out


CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _flop(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    if func.name() == CPU_ATTENTION:  # torch's registry has only the GPU kernels
        return sdpa_flop_count(*(t.shape for t in args[:3]))
    if func.name() == f"{CPU_ATTENTION}_backward":
        return sdpa_backward_flop_count(*(t.shape for t in args[:4]))
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=out) if formula else 0
