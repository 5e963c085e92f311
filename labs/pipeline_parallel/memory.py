"""How many bytes autograd keeps at the same time, counted while a step runs."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from labs.kit._compat import storage_key


class _Held:
    """A saved tensor: it is freed when the graph drops its last reference to this."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Kept:
    """Bytes of the tensors saved for backward: `now` and at their `peak`. Each storage counts once, and whole."""

    def __init__(self, states: Iterable[Tensor]) -> None:
        self.own = {storage_key(t.untyped_storage()) for t in states}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, saved: Tensor) -> _Held | Tensor:
        """Count what is saved; parameters and buffers, which are there anyway, are not."""
        storage = saved.untyped_storage()
        if storage_key(storage) in self.own:
            return saved
        if not self.holders[storage_key(storage)]:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self.holders[storage_key(storage)] += 1
        held = _Held(saved.detach())
        weakref.finalize(held, self._free, storage_key(storage), storage.nbytes())
        return held

    def unpack(self, held: _Held | Tensor) -> Tensor:
        """What was saved."""
        return held.tensor if isinstance(held, _Held) else held

    def _free(self, storage: int, nbytes: int) -> None:
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.now -= nbytes


@contextlib.contextmanager
def counting(states: Iterable[Tensor]) -> Iterator[Kept]:
    """Count what is saved for backward inside the block; `states` are parameters and buffers, which do not count."""
    kept = Kept(states)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield kept
