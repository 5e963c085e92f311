"""Which collectives a rank calls, and with how many bytes, without torch's dispatch modes.

Entering one of those imports 800 modules in every new rank: a second or two, for a check that takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

PREFIXES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter":
    "reduce_scatter", "reduce": "reduce", "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast":
    "broadcast", "gather": "gather", "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip
"""Of the methods of a process group, in which all functions of torch.distributed end: _allgather_base and so on."""


@dataclass(frozen=True)
class Call:
    """One collective, with the bytes of its largest buffer: of what is gathered, the whole."""

    kind: str
    bytes: int


@contextmanager
def watched(calls: list[Call]) -> Iterator[None]:
    """Within, every collective of this process is added to `calls`."""
    before = {name: m for name, m in vars(dist.ProcessGroup).items() if _kind(name)}

    def counted(name: str) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            calls.append(Call(_kind(name), max((_bytes(a) for a in args), default=0)))
            return before[name].__get__(group)(*args, **kwargs)

        return call

    try:
        for name in before:
            setattr(dist.ProcessGroup, name, counted(name))
        yield
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)


def _kind(method: str) -> str:
    """What it does; "" if it moves no tensors."""
    return next((kind for prefix, kind in PREFIXES.items() if method.lstrip("_").startswith(prefix)), "")


def _bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(_bytes, argument)) if isinstance(argument, list | tuple) else 0
