"""Every storage that operations allocate, from its first to its last moment: no snapshot is ever taken.

Each operation is seen once, below autograd; new storages among its results are noted with a weak reference, which
tells when they go. What a block was for is decided at the end, when it is known how long it lived.

A mode is seen, too: where a tensor is used twice, autograd adds the second gradient to the first in place, but makes
a new tensor while any TorchDispatchMode is on. The tracker notes what happens without one.
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
    """A stretch of the step."""

    phase: Phase
    runs_model: bool
    """Forward, and again in backward where a checkpoint wants that."""


@dataclass(eq=False)
class Block:
    """A storage, while it lives and after it."""

    nbytes: int
    made_in: int
    """Number of its segment."""
    freed_in: int | None = None
    """None: it outlives the step."""
    category: str = ""
    """Empty: decided when the step is over."""


class Tracker(TorchDispatchMode):
    """Notes what the operations in its context allocate and free. `rounding`: bytes that sizes are multiples of."""

    def __init__(self, rounding: int = 1) -> None:
        super().__init__()
        self.rounding = rounding
        self.live: dict[int, tuple[Block, weakref.ref]] = {}
        self.moves: list[tuple[Block, int, int, Any, int]] = []  # block, +1 or -1, operation, its function, segment
        self.segments = [Segment("before", False)]
        self.op: tuple[int, Any] = (0, None)
        self.summand: tuple[int, Block | None] = (0, None)  # operation, and what it adds to
        self.on_repeated: Callable[[], object] = lambda: None  # called when a second run in backward is over

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled here, and torch then calls __torch_dispatch__ without a wrapper."""
        return False

    def hold(self, tensors: Iterable[Tensor], category: str) -> None:
        """`tensors` are of `category`, from the beginning of their storages; unknown ones are there from now on."""
        for t in tensors:
            storage = t.untyped_storage()
            if storage_key(storage) not in self.live:
                self._note(storage)
            self.live[storage_key(storage)][0].category = category

    def begin(self, phase: Phase) -> None:
        """What comes now belongs to `phase`."""
        self.segments.append(Segment(phase, phase == "forward"))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        if func is torch.ops.prim.device.default and isinstance(args[0], internals.FakeTensor):
            return args[0].fake_device  # autograd's engine asks for it more often than for anything else
        self.op = (self.op[0] + 1, func)
        if self.segments[-1].phase == "backward":
            self._second_run(torch.is_grad_enabled())
            if func is torch.ops.aten.add.Tensor and internals.called_by_engine(sys._getframe()):
                self.summand = (self.op[0], self.live[storage_key(args[0].untyped_storage())][0])
        out = func(*args, **(kwargs or {}))
        for t in (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else ():
            if isinstance(t, Tensor):
                self._seen(t)
            elif isinstance(t, list):  # of operations on lists of tensors
                for u in t:
                    self._seen(u)
        return out

    def _second_run(self, now: bool) -> None:
        """Backward itself runs without gradients: what needs them is a forward pass that is run again."""
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
        """As the last move, or before the sum that would have taken the place of `block`."""
        move, (sum_block, *_) = (block, -1, *self.op, block.freed_in), self.moves[-1]
        in_place = self.summand == (self.op[0], block) and sum_block.nbytes == block.nbytes
        self.moves.insert(len(self.moves) - in_place, move)

    def events(self) -> tuple[Event, ...]:
        """What was noted, every block with its category."""
        found = []
        for block, sign, step, func, segment in self.moves:
            name = "" if func is None else func.overloadpacket.__name__
            change = Event(step, name, self.segments[segment].phase, sign * block.nbytes, self.category(block))
            if block.nbytes:
                found.append(change)
        return tuple(found)

    def category(self, block: Block) -> str:
        """Of CATEGORIES: as `hold` said, or by what outlives the run of the model in which it was made."""
        kept = self.segments[block.made_in].runs_model and block.freed_in != block.made_in
        return block.category or ("activations" if kept else "temporaries")
