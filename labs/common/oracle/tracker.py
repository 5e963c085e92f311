"""Track every storage that operations allocate, over its lifetime, without snapshots.

Each operation is seen once, below autograd. New storages among its results get a weak reference, which reports when
they are freed. A block's category is decided at the end, when its lifetime is known.

The mode itself has a side effect: where a tensor is used twice, autograd normally adds the second gradient to the first
in place, but makes a new tensor while any TorchDispatchMode is on. The tracker records what happens without a mode.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labs.common.oracle import internals
from labs.common.oracle.internals import TorchDispatchMode
from labs.common.oracle.trace import Event, Phase
from labs.kit._compat import storage_key

CUDA_BLOCK_BYTES = 512  # kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp: all sizes are multiples of it


@dataclass(frozen=True)
class Segment:
    """A section of the step."""

    phase: Phase
    runs_model: bool
    """Forward, and also recomputation in backward."""


@dataclass(eq=False)
class Block:
    """A storage, during its life and after it."""

    nbytes: int
    made_in: int
    """Number of the segment that allocated it."""
    freed_in: int | None = None
    """None: it outlives the step."""
    category: str = ""
    """Empty: decided when the step is over."""


class Tracker(TorchDispatchMode):
    """Records what the operations in its context allocate and free. `rounding`: sizes are multiples of these bytes."""

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.live: dict[int, tuple[Block, weakref.ref]] = {}
        self.moves: list[tuple[Block, int, int, Any, int]] = []  # block, +1 or -1, operation, its function, segment
        self.segments = [Segment("before", False)]
        self.op: tuple[int, Any] = (0, None)
        self.summand: tuple[int, Block | None] = (0, None)  # operation, and what it adds to
        self.on_repeated: Callable[[], object] = lambda: None  # called after a second run in backward

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiles here, and torch then calls __torch_dispatch__ without a wrapper."""
        return False

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """Assign `tensors` to `category` since their storages began; unknown storages begin now."""
        for t in tensors:
            storage = t.untyped_storage()
            if storage_key(storage) not in self.live:
                self._note(storage)
            self.live[storage_key(storage)][0].category = category

    def begin(self, phase: Phase) -> None:
        """Assign what follows to `phase`."""
        self.segments.append(Segment(phase, phase == "forward"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handle each operation; PyTorch calls this with the mode switched off."""
        if func is torch.ops.prim.device.default and isinstance(args[0], internals.FakeTensor):
            return args[0].fake_device  # autograd's engine asks for the device more often than for anything else
        self.op = (self.op[0] + 1, func)
        if self.segments[-1].phase == "backward":
            self._second_run(torch.is_grad_enabled())
            if func is torch.ops.aten.add.Tensor and internals.called_by_engine(sys._getframe()):
                self.summand = (self.op[0], self.live[storage_key(args[0].untyped_storage())][0])
        out = func(*args, **(kwargs or {}))
        for t in (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else ():
            if isinstance(t, Tensor):
                self._seen(t)
            elif isinstance(t, list):  # from operations on lists of tensors
                for u in t:
                    self._seen(u)
        return out

    def _second_run(self, now: bool) -> None:
        """Detect recomputation: backward runs without gradients, so anything that needs them is a second forward."""
        if now != self.segments[-1].runs_model:
            self.segments.append(Segment("backward", now))
            if not now:
                self.on_repeated()

    def _seen(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage_key(storage) not in self.live:
            self._note(storage)

    def _note(self, storage: torch.UntypedStorage) -> None:
        nbytes = -(-storage.nbytes() // self.rounding) * self.rounding
        block = Block(nbytes, len(self.segments) - 1)
        gone = weakref.ref(storage, partial(self._gone, storage_key(storage)))
        self.live[storage_key(storage)] = (block, gone)
        self.moves.append((block, 1, *self.op, block.made_in))

    def _gone(self, key: int, _: weakref.ref) -> None:
        block, _ = self.live.pop(key)
        block.freed_in = len(self.segments) - 1
        self._freed(block)

    def _freed(self, block: Block) -> None:
        """Append the move, or insert it before the sum that would have reused `block`."""
        move, (sum_block, *_) = (block, -1, *self.op, block.freed_in), self.moves[-1]
        in_place = self.summand == (self.op[0], block) and sum_block.nbytes == block.nbytes
        self.moves.insert(len(self.moves) - in_place, move)

    def events(self) -> tuple[Event, ...]:
        """Return the recorded events, every block with its category."""
        found = []
        for block, sign, step, func, segment in self.moves:
            name = "" if func is None else func.overloadpacket.__name__
            change = Event(step, name, self.segments[segment].phase, sign * block.nbytes, self.category(block))
            if block.nbytes:
                found.append(change)
        return tuple(found)

    def category(self, block: Block) -> str:
        """Return a category: as set by `hold`, or by whether the block outlives the forward run that made it."""
        kept = self.segments[block.made_in].runs_model and block.freed_in != block.made_in
        return block.category or ("activations" if kept else "temporaries")
