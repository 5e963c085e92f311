"""Blocks of exercise 05.2 that note how they are called, and runs of them: calls, bytes, gradients, random numbers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from labs.kit.check import Mistake

Function = Callable[..., Any]
ROWS, WIDTH, HIDDEN = 64, 32, 128


@dataclass(frozen=True)
class Call:
    """One time that the block ran."""

    in_backward: bool
    grad_enabled: bool
    mask: tuple[float, ...]
    """The first numbers of dropout's mask."""
    torchs_own: bool
    """Whether torch.utils.checkpoint made the call."""


class Block(nn.Module):
    """Two linear layers with dropout between them, which note how they are called."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self._run = [run]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        mask = nn.functional.dropout(torch.ones_like(hidden), 0.5)
        run = self._run[0]
        with torch.no_grad():
            drawn = tuple(mask.flatten()[:64].tolist())
        run.calls.append(Call(run.in_backward, torch.is_grad_enabled(), drawn, _called_by_torchs_own()))
        return self.down(hidden * mask)


def _called_by_torchs_own() -> bool:
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
        frame = frame.f_back
    return frame is not None


class _Allocated(TorchDispatchMode):
    """Remembers each storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self, *but: Tensor) -> int:
        """Bytes of those that still exist, except for those of some tensors."""
        known = {t.untyped_storage()._cdata for t in but}
        return sum(n for key, (ref, n) in self.storages.items() if key not in known and not ref.expired())


@dataclass(frozen=True)
class Scene:
    """How blocks are used."""

    words: str
    blocks: tuple[int, ...] = (0,)
    """Which block comes when; 0 twice is a block that is used twice."""
    x_needs_grad: bool = True
    passes: int = 1
    """Forward and backward passes whose gradients add up."""


SCENES = (
    Scene("one block"),
    Scene("one block, whose input needs no gradient", x_needs_grad=False),
    Scene("two micro-batches, whose gradients add up", passes=2),
    Scene("three blocks, one after the other", blocks=(0, 1, 2)),
    Scene("a block that is used twice", blocks=(0, 1, 0)),
)


@dataclass(eq=False)
class Run:
    """What one scene did with one function."""

    scene: Scene
    collect: bool = True
    """Whether garbage is collected before bytes are counted; that takes long in a large process."""
    calls: list[Call] = field(default_factory=list)
    in_backward: bool = False
    outputs: list[Tensor] = field(default_factory=list)
    kept_bytes: int = 0
    is_function: bool = False
    """Whether the last output comes from a torch.autograd.Function,"""
    given: int = 0
    """and how many things its apply() was given that autograd knows."""
    x_grad: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    drawn: tuple[float, float] = (0.0, 0.0)
    """One number drawn from torch between forward and backward, and one after backward."""
    cut_off: bool = False
    """Whether the output does not require grad, so that there is no backward pass."""
    error: Exception | None = None

    def play(self, f: Function) -> Run:
        blocks = [Block(self, seed) for seed in range(max(self.scene.blocks) + 1)]
        draw = torch.Generator().manual_seed(1)
        x, wanted = (torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
        x.requires_grad_(self.scene.x_needs_grad)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            try:
                for _ in range(self.scene.passes):
                    self._one_pass(f, blocks, x, wanted)
            except (RuntimeError, AttributeError, TypeError, ValueError) as error:
                self.error = error
        self.x_grad, self.gradients = x.grad, [p.grad for block in blocks for p in block.parameters()]
        return self

    def _one_pass(self, f: Function, blocks: list[Block], x: Tensor, wanted: Tensor) -> None:
        self.in_backward = False
        with _Allocated() as allocated:
            y, between = x, []
            for i in self.scene.blocks:
                y = f(blocks[i], y)
                if not isinstance(y, Tensor) or y.shape != x.shape:
                    got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
                    raise Mistake(f"checkpointed(block, x) gives {got}, not a tensor as block(x) does",
                                  "return what YourFunction.apply(x, *block.parameters()) gives")  # fmt: skip
                between.append(y)
        there_anyway = [*between, x, *(p for block in blocks for p in block.parameters())]
        self.kept_bytes = allocated.alive(*there_anyway)
        if self.collect and self.kept_bytes > 2 * ROWS * HIDDEN * len(
            self.scene.blocks
        ):  # garbage in cycles counts, too
            gc.collect()
            self.kept_bytes = allocated.alive(*there_anyway)
        self.outputs = [t.detach().clone() for t in between]
        self.is_function = isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        self.given = len(y.grad_fn.next_functions) if self.is_function else 0
        self.cut_off = not y.requires_grad
        if self.cut_off:
            return
        first = torch.rand(()).item()
        self.in_backward = True
        ((y - wanted).square().sum() / 100).backward()
        self.drawn = (first, torch.rand(()).item())
