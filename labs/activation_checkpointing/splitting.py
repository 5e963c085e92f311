"""How much memory a chain of blocks needs if it is cut into segments that are computed again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174: k segments of n equal layers keep
k inputs and, while one of them is in work, n/k layers; k = sqrt(n) makes the sum smallest, 2 sqrt(n).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from labs.common.memory.recomputation import blocks
from labs.common.models import Workload
from labs.kit._compat import storage_key

THERE = -1  # in place of a block's number: parameters, buffers and the batch take no more memory
Segments = Sequence[tuple[int, int, bool]]


@dataclass(frozen=True)
class Chain:
    """Bytes of a model's blocks and of what is around them, in a step without checkpointing."""

    kept: tuple[int, ...]
    """What each block leaves for backward, its input too if it keeps that."""
    inputs: tuple[int, ...]
    """Input of each block: what a segment that begins there keeps."""
    gradients: tuple[int, ...]
    """Of each block's parameters."""
    outside: int = 0
    """Kept before, after and beside the blocks."""
    fixed: int = 0
    """There before the step: parameters, optimizer state, the batch."""
    state: int = 0
    """Of the random state that each checkpoint keeps, where that is in the same memory."""
    borrowed: tuple[int, ...] = ()
    """What each block needs and an earlier one keeps already, as Tanh its output; last, what comes after the blocks."""
    optimizer: int = 0
    """What the optimizer's step makes for a moment beside all gradients; 0 if too little to matter."""


@dataclass(frozen=True)
class Moment:
    """What is alive when the backward of a block begins, or while the optimizer steps, in bytes."""

    fixed: int
    outside: int
    boundaries: int
    """Inputs of the segments that are still to come, and their random states."""
    segment: int
    """What the segment in work still keeps, with its input."""
    gradients: int
    """Of the parameters of the blocks that are done."""
    passing: int = 0
    """Gradients of activations and what else backward holds for a moment."""
    optimizer: int = 0
    """What its step makes for a moment."""

    @property
    def total(self) -> int:
        """All of it: the peak."""
        parts = (self.outside, self.boundaries, self.segment, self.gradients, self.passing, self.optimizer)
        return self.fixed + sum(parts)


def at_peak(chain: Chain, segments: Segments, passing: int = 0) -> Moment:
    """The moment with most bytes; `segments` as recomputation.segments gives them, empty without checkpointing.

    `passing`: gradients of activations and what else backward holds for a moment, from the step without checkpointing.

    For n equal blocks that keep A bytes each, with inputs of b and gradients of g, and k segments of m = n/k blocks:
    fixed + outside + the largest of m A + (k - 1) b, m A + (n - m) g and A + (n - 1) g; or, where it is more, fixed
    + n g and what the optimizer's step makes.
    """
    runs = segments or [(0, len(chain.kept), False)]

    def moment(i: int, block: int) -> Moment:
        before, (start, _, again) = runs[:i], runs[i]
        boundaries = sum(chain.inputs[a] + chain.state for a, _, _ in before) + chain.state * again
        segment = sum(chain.kept[start : block + 1]) + _borrowed(chain, start)
        return Moment(chain.fixed, chain.outside, boundaries, segment, sum(chain.gradients[block + 1 :]), passing)

    moments = [moment(i, b) for i, (start, stop, _) in enumerate(runs) for b in range(start, stop)]
    if chain.optimizer:  # activations are gone by then
        moments.append(Moment(chain.fixed, 0, 0, 0, sum(chain.gradients), optimizer=chain.optimizer))
    return max(moments, key=lambda m: m.total)


def after_forward(chain: Chain, segments: Segments) -> int:
    """Bytes that forward leaves behind: inputs of the segments that run again, all of the others, what is outside."""
    runs = segments or [(0, len(chain.kept), False)]
    kept = [chain.inputs[a] + chain.state if again else sum(chain.kept[a:b]) for a, b, again in runs]
    # Where a segment drops what the next one, or the loss, needs of it.
    joints = ((stop, again and not stays) for (_, stop, again), (*_, stays) in pairwise([*runs, (0, 0, False)]))
    return chain.outside + sum(kept) + sum(_borrowed(chain, block) for block, needed in joints if needed)


def _borrowed(chain: Chain, block: int) -> int:
    return chain.borrowed[block] if chain.borrowed else 0


def share_again(blocks: int, segments: Segments) -> float:
    """Share of the blocks that run a second time."""
    return sum(b - a for a, b, again in segments if again) / blocks


def time_ratio(share: float, forward: float = 1 / 3) -> float:
    """Step time with against without, if a `share` of the blocks runs again and `forward` is forward's part of a step.

    A third, of the operations: backward takes twice those of forward. An upper bound there: what is outside of the
    blocks does not run again, and torch stops as soon as it has all that backward needs.
    """
    return 1 + share * forward


def best_segments(chain: Chain) -> float:
    """The k that makes k b + n A / k smallest: sqrt(n A / b) with mean values; sqrt(n) if a block keeps no more.

    Above n, the number of blocks, it means: a segment for each block.
    """
    inputs = [b for b in chain.inputs if b]  # the batch is there anyway
    return math.sqrt(sum(chain.kept) / (sum(inputs) / len(inputs)))


@dataclass
class _Ledger:
    """Who saved which storage first, while a forward pass runs."""

    place: int | None = None
    kept: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    borrowed: dict[tuple[int | None, int], int] = field(default_factory=dict)

    def enter(self, i: int, given: Iterable[Any]) -> None:
        storages = (x.untyped_storage() for x in given if isinstance(x, Tensor))
        self.place = i
        self.inputs[i] = sum(s.nbytes() for s in storages if self.kept.get(storage_key(s), (None, 0))[0] != THERE)

    def leave(self) -> None:
        self.place = None

    def save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        first, size = self.kept.setdefault(storage_key(storage), (self.place, storage.nbytes()))
        if self.inputs and first != self.place:
            self.borrowed[self.place, storage_key(storage)] = size
        return tensor.detach()  # must stay alive: the next storage would get the address of a freed one

    def of(self, place: int | None) -> int:
        return sum(size for where, size in self.kept.values() if where == place)

    def borrowed_by(self, place: int | None) -> int:
        return sum(size for (where, _), size in self.borrowed.items() if where == place)


def trace_chain(workload: Workload, x: Tensor, y: Tensor, fixed: int = 0) -> Chain:
    """The chain of a model that has no policy, from what autograd keeps in one forward pass of the batch (x, y)."""
    module, found, ledger = workload.module, blocks(workload.module), _Ledger()
    for t in (*module.parameters(), *module.buffers(), x, y):
        ledger.kept[storage_key(t.untyped_storage())] = (THERE, 0)
    hooks: list[torch.utils.hooks.RemovableHandle] = []
    for i, block in enumerate(found):
        hooks.append(
            block.register_forward_pre_hook(
                lambda m, args, named, i=i: ledger.enter(i, (*args, *named.values())), with_kwargs=True
            )
        )
        hooks.append(block.register_forward_hook(lambda m, args, out: ledger.leave()))
    try:
        with torch.autograd.graph.saved_tensors_hooks(ledger.save, lambda saved: saved):
            loss = workload.loss(module(x), y)
    finally:
        for hook in hooks:
            hook.remove()
    del loss
    places, state = range(len(found)), torch.get_rng_state().nbytes if x.device.type == "cpu" else 0
    borrowed = tuple(map(ledger.borrowed_by, (*places, None)))
    return Chain(
        tuple(map(ledger.of, places)),
        tuple(ledger.inputs[i] for i in places),
        tuple(map(_gradient_bytes, found)),
        ledger.of(None),
        fixed,
        state,
        borrowed,
    )


def _gradient_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)
