"""What a rank sends: each collective and message that it starts, its bytes by closed form, and what TCP carried.

Two counters that know nothing of each other. `Traffic` sees the calls, with the bytes of their buffers; a closed form
turns these into bytes that leave the rank. `labs.common.data_parallel.wire` asks the kernel what left
through the rank's connections.
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

# Names of torch's operations, without the underscores around: in place, of torch.distributed and FSDP2 (c10d), and
# functional, of DTensor (_c10d_functional).
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
    """One call: what, with a buffer of how many bytes (the whole, gathered one), in which group of how many ranks."""

    kind: str
    bytes: int
    ranks: int
    group: str
    peer: int | None = None
    """Of a message, the other rank's place in the group."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank sends, by the closed form of a ring; of a broadcast, the share of an average rank."""
        return sent_bytes(self.kind, self.bytes, self.ranks)


def sent_bytes(kind: str, size: float, ranks: int, gloo: bool = False) -> float:
    """Bytes each of `ranks` sends for a buffer of `size` bytes: the whole one, of all ranks together.

    Rings send 2 (n-1)/n S for an all-reduce, half of that for an all-gather or a reduce-scatter (Patarasuk & Yuan
    2009). `gloo` tells what gloo really does: its reduce-scatter is an all-reduce of which each rank keeps its part.
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
    """Within `with Traffic() as traffic:` every collective and message that this rank starts is noted.

    DDP's own all-reduces are among them, as are those few bytes by which it agrees on its buckets in its first step.
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
        size = max(nbytes(*tree_leaves(a)) for a in args[:2] if _has_tensors(a))  # input or output, the larger
        if kind == "all_gather" and not _has_tensors(args[1]):  # the functional form has no output to write to
            size *= group.size()
        peer = args[2] if kind in ("send", "recv") else None
        self.calls.append(Call(kind, size, group.size(), group.group_name, peer))

    def count(self) -> Counter[str]:
        """Calls by kind."""
        return Counter(c.kind for c in self.calls)

    def sent(self, group: dist.ProcessGroup | None = None) -> Counter[str]:
        """Bytes that this rank sent, by kind, by closed form; in one group only, if it is given."""
        total: Counter[str] = Counter()
        for call in self.calls:
            if group is None or call.group == group.group_name:
                total[call.kind] += call.sent_bytes
        return total


def traffic_of(call: Callable[[], object], rank: Rank) -> tuple[Traffic, list[int] | None]:
    """(what one `call` starts on this rank, bytes that TCP carried for each rank during it). Collective.

    None in place of the bytes where a kernel does not count, or GPUs talk past TCP.
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
    """The group among a call's arguments, where it is boxed, or its name."""
    for a in reversed(args):
        if isinstance(a, str) and a not in ("sum", "avg", "max", "min"):
            return _compat.resolve_group(a)
        if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(_compat.script_type(a)):
            return dist.ProcessGroup.unbox(a)
    return dist.group.WORLD
