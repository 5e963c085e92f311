"""What a rank sends: each collective and message that it starts, its bytes by closed form, and what TCP carried.

Two independent counters: `Traffic` sees the calls with their buffer sizes, which a closed form turns into bytes sent.
`labs.common.data_parallel.wire` asks the kernel what left through the rank's connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.common.data_parallel.wire import sent_by
from labs.common.tensors import nbytes
from labs.kit import _compat
from labs.kit._compat import TorchDispatchMode, tree_leaves
from labs.kit.rank import Rank

# Names of torch's operations, without surrounding underscores: in place, from torch.distributed and FSDP2 (c10d), and
# functional, from DTensor (_c10d_functional).
KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}


@dataclass(frozen=True)
class Call:
    """One call: its kind, its (whole, gathered) buffer size, its group, and that group's number of ranks."""

    kind: str
    bytes: int
    ranks: int
    group: str
    peer: int | None = None
    """For a message, the other rank's index in the group."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends, by a ring's closed form; for a broadcast, an average rank's share."""
        return sent_bytes(self.kind, self.bytes, self.ranks)


def sent_bytes(kind: str, size: float, ranks: int, gloo: bool = False) -> float:
    """Return the bytes that each of `ranks` sends for a whole buffer of `size` bytes.

    Rings send 2 (n-1)/n S for an all-reduce, half of that for an all-gather or a reduce-scatter (Patarasuk & Yuan
    2009). `gloo` follows gloo's implementation: its reduce-scatter is an all-reduce of which each rank keeps its part.
    """
    share = (ranks - 1) / ranks
    if kind == "reduce_scatter" and gloo:
        kind = "all_reduce"
    factors = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "broadcast": share,
        "send": 1.0,
        "recv": 0.0,
    }
    return factors[kind] * size


class Traffic(TorchDispatchMode):
    """Records every collective and message that this rank starts within `with Traffic() as traffic:`.

    Includes DDP's all-reduces, and the few bytes by which DDP agrees on its buckets in the first step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = KINDS.get(func.overloadpacket.__name__.strip("_"))
            if kind:
                self._note(kind, args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args: tuple) -> None:
        group = _group(args)
        size = max(nbytes(*tree_leaves(a)) for a in args[:2] if _has_tensors(a))  # the larger of input and output
        if kind == "all_gather" and not _has_tensors(args[1]):  # the functional form has no output argument
            size *= group.size()
        peer = args[2] if kind in ("send", "recv") else None
        self.calls.append(Call(kind, size, group.size(), group.group_name, peer))

    def count(self) -> Counter[str]:
        """Count calls by kind."""
        return Counter(c.kind for c in self.calls)

    def sent(self, group: dist.ProcessGroup | None = None) -> Counter[str]:
        """Return bytes sent by this rank, by kind and closed form; optionally in one group only."""
        total: Counter[str] = Counter()
        for call in self.calls:
            if group is None or call.group == group.group_name:
                total[call.kind] += call.sent_bytes
        return total


def traffic_of(call: Callable[[], object], rank: Rank) -> tuple[Traffic, list[int] | None]:
    """Return (what one `call` starts on this rank, bytes that TCP carried for each rank during it). Collective.

    The bytes are None if a kernel doesn't count, or if GPUs bypass TCP.
    """
    traffic = Traffic()

    def noted() -> None:
        with traffic:
            call()

    carried = sent_by(noted, rank)
    return traffic, carried if rank.device.type == "cpu" else None


def _has_tensors(argument: Any) -> bool:
    leaves = tree_leaves(argument)
    return bool(leaves) and all(isinstance(t, Tensor) for t in leaves)


def _group(args: tuple) -> dist.ProcessGroup:
    """Return the group among a call's arguments, where it is boxed, or given by name."""
    for a in reversed(args):
        if isinstance(a, str) and a not in ("sum", "avg", "max", "min"):
            return _compat.resolve_group(a)
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(_compat.script_type(a)):
            return dist.ProcessGroup.unbox(a)
    return dist.group.WORLD
