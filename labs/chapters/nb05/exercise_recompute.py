"""Exercise 05.2: a stack recomputed under a budget of bytes, tried on blocks that note how they are called."""

from __future__ import annotations

import functools
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from labs.chapters.nb05.exercise_states import one_thread
from labs.kit._compat import TorchDispatchMode, storage_key
from labs.kit.check import Mistake

# -- the task: blocks that note how they are called, and stacks of them


Function = Callable[..., Any]
Finding = tuple[str, str]
"""What was done, and a hint."""
ROWS, WIDTH = 64, 32
SLACK = 8192  # bytes per block that runs again: the random state that is kept for it takes about 5,000


@dataclass(frozen=True)
class Call:
    """One time that a block ran."""

    block: int
    in_backward: bool
    mask: tuple[float, ...]
    """The first numbers of dropout's mask."""


class Block(nn.Module):
    """Two linear layers with dropout between them, which note how they are called."""

    def __init__(self, run: Run, number: int, hidden: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self._number, self._run = number, [run]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 32) -> (rows, 32)."""
        hidden = torch.tanh(self.up(x))
        mask = nn.functional.dropout(torch.ones_like(hidden), 0.5, self.training)
        run = self._run[0]
        with torch.no_grad():
            run.calls.append(Call(self._number, run.in_backward, tuple(mask.flatten()[:64].tolist())))
        out = self.down(hidden * mask)
        run.between |= {storage_key(t.untyped_storage()): StorageWeakRef(t.untyped_storage()) for t in (x, out)}
        return out


class Allocated(TorchDispatchMode):
    """Remembers each storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the number from others

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.storages[storage_key(storage)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self, but: set[int] = frozenset()) -> int:
        """Bytes of those that still exist, except for storages with these numbers. Forgets those that do not."""
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        return sum(n for key, (_, n) in self.storages.items() if key not in but)


@dataclass(frozen=True)
class Scene:
    """A stack of blocks, by their hidden widths, and how many of the largest the budget has no room for."""

    words: str
    hidden: tuple[int, ...]
    over: int
    room: float = 0.5
    """Of the smallest of these: how much of it the budget still has room for; 0 is a budget that is met exactly."""
    x_needs_grad: bool = True
    passes: int = 1
    """Forward and backward passes whose gradients add up."""

    def budget(self, kept: list[int]) -> int:
        """Bytes."""
        order = sorted(kept, reverse=True)
        return sum(order[self.over :]) + int(self.room * (order[self.over - 1] if self.over else order[-1]))


SCENES = (
    Scene("three blocks, a large one between two smaller ones", (64, 256, 128), over=1),
    Scene("a budget that is met exactly when the two largest of five run again", (192, 64, 256, 96, 32), 2, room=0),
    Scene("room for all four blocks", (64, 128, 96, 32), over=0),
    Scene("a budget of nothing, and two blocks of the same size", (64, 96, 64), over=3, room=0),
    Scene("x needs no gradient, and the first block is the largest", (256, 64, 96), over=1, x_needs_grad=False),
    Scene("two micro-batches, whose gradients add up", (64, 192, 128), over=2, passes=2),
)


@dataclass(eq=False)
class Run:
    """What one scene did with one function."""

    scene: Scene
    collect: bool = True
    """Whether garbage is collected before bytes over the budget are counted; that takes long in a large process."""
    calls: list[Call] = field(default_factory=list)
    between: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages of blocks' inputs and outputs in this pass, by number: the budget does not count them."""
    in_backward: bool = False
    output: Tensor | None = None
    kept_bytes: int = 0
    x_grad: Tensor | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    drawn: tuple[float, float] = (0.0, 0.0)
    """One number drawn from torch between forward and backward, and one after backward."""
    cut_off: bool = False
    """Whether the output does not require grad, so that there is no backward pass."""
    error: Exception | None = None
    flag_changed: bool = False
    """Whether the caller's x has another requires_grad now."""
    blocks_changed: bool = False
    kept_changed: bool = False
    """Whether the caller's list holds other numbers now."""

    def play(self, f: Function, kept: list[int], budget: int) -> Run:
        """Forward and backward through the stack, as `f(blocks, x, kept_bytes, budget_bytes)` runs it."""
        blocks = [Block(self, i, hidden) for i, hidden in enumerate(self.scene.hidden)]
        draw = torch.Generator().manual_seed(1)
        x, wanted = (torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2))
        x.requires_grad_(self.scene.x_needs_grad)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            try:
                for _ in range(self.scene.passes):
                    self._one_pass(f, blocks, x, wanted, kept, budget)
            except Mistake:
                raise
            except Exception as error:  # the learner's, or torch's on what it was given
                self.error = error
        self.flag_changed = x.requires_grad != self.scene.x_needs_grad
        self.x_grad, self.gradients = x.grad, [p.grad for block in blocks for p in block.parameters()]
        return self

    def _one_pass(self, f: Function, blocks: list[Block], x: Tensor, wanted: Tensor, kept: list, budget: int) -> None:
        self.in_backward = False
        self.between.clear()
        given, numbers = list(blocks), list(kept)
        with Allocated() as allocated:
            y = f(given, x, numbers, budget)
        self.kept_changed |= numbers != kept
        self.blocks_changed |= given != blocks or any("forward" in vars(block) for block in blocks)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise Mistake(
                f"run_stack(...) gives {got}, not a tensor as the last block does", "return what the last block gives"
            )
        there_anyway = set(self.between) | {storage_key(p.untyped_storage()) for b in blocks for p in b.parameters()}
        there_anyway |= {storage_key(t.untyped_storage()) for t in (x, y)}
        self.kept_bytes = allocated.alive(there_anyway)
        if self.collect and self.kept_bytes > budget:  # garbage in cycles counts, too
            gc.collect()
            self.kept_bytes = allocated.alive(there_anyway)
        self.output = y.detach().clone()
        self.cut_off = not y.requires_grad
        if self.cut_off:
            return
        first = torch.rand(()).item()
        self.in_backward = True
        ((y - wanted).square().sum() / 100).backward()
        self.drawn = (first, torch.rand(()).item())


def plain(blocks: list[nn.Module], x: Tensor, kept_bytes: list[int], budget_bytes: int) -> Tensor:
    """The stack without any budget."""
    for block in blocks:
        x = block(x)
    return x


@functools.cache
def kept_by(hidden: int) -> int:
    """Bytes that a block of this width keeps for backward, beside its input and output."""
    return Run(Scene("", (hidden,), over=0), collect=False).play(plain, [0], 0).kept_bytes


# -- the checks: bytes, blocks that run again, gradients, random numbers


def check_run_stack(f: Function) -> None:
    """Six stacks: a budget met exactly, one of nothing, one with room for all; gradients, bytes, random states."""
    for scene in SCENES:
        with one_thread():
            kept = [kept_by(hidden) for hidden in scene.hidden]
            budget = scene.budget(kept)
            own, right = (Run(scene, collect=g is f).play(g, kept, budget) for g in (f, plain))
        for what, hint in _faults(own, right, budget):
            raise Mistake(f"{scene.words}: {what}", hint) from own.error
        if own.error is not None:
            raise own.error


def _faults(own: Run, right: Run, budget: int) -> Iterator[Finding]:
    yield from _forward(own, right)
    if own.cut_off:
        yield (
            "the output does not require grad: what runs under no_grad, or with use_reentrant=True on an x "
            "that needs "
            "no gradient, is cut off",
            "checkpoint(block, x, use_reentrant=False)",
        )
    yield from _errors(own)
    if own.error is None:
        yield from _again(own)
        yield from _budget(own, budget)
        yield from _gradients(own, right)
        yield from _random(own, right)
        if own.kept_changed:
            yield (
                "kept_bytes holds other numbers afterwards: the next step would get these, and run other blocks again",
                "left = list(kept_bytes), and change that",
            )
        if own.blocks_changed:
            yield (
                "the caller's blocks are others afterwards, in the list or by a new forward: the next step would "
                "wrap them once more",
                "leave `blocks` as they are: call checkpoint() where they run",
            )
        if own.flag_changed:
            yield (
                "the caller's x requires a gradient now: requires_grad_() works in place, and this was not your tensor",
                "checkpoint(block, x, use_reentrant=False) needs no such thing",
            )


LATE = (
    "backward runs another block than forward did: a lambda or a function looks `block` up when it is "
    "called, and in "
    "backward the loop is over",
    "checkpoint(block, x, use_reentrant=False): give the block itself",
)


def _forward(own: Run, right: Run) -> Iterator[Finding]:
    ran, wanted = ([c.block for c in run.calls if not c.in_backward] for run in (own, right))
    if own.error is None and ran != wanted:
        yield (f"in forward the blocks {ran} ran, one after the other {wanted} would do", "each block once, in order")
    if own.output is not None and not torch.equal(own.output, right.output):
        yield (
            "the output is not that of the blocks one after the other with the same seed: something drew random "
            "numbers before, or a block is in another mode",
            "x = block(x), or x = checkpoint(block, x, ...)",
        )


ERRORS = [
    (r"different metadata|different number of tensors", *LATE),
    (
        r"does not require grad and does not have a grad_fn",
        "the second run recorded nothing: use_reentrant=True gives no gradient where x needs none",
        "use_reentrant=False",
    ),
    (
        r"backward through the graph a second time",
        "the second run goes on into the blocks before: its x still belongs to the first graph",
        "x = x.detach().requires_grad_()",
    ),
]


def _errors(own: Run) -> Iterator[Finding]:
    for words, what, hint in ERRORS:
        if own.error is not None and re.search(words, str(own.error)):
            yield what, hint


def _again(own: Run) -> Iterator[Finding]:
    """Each block at most once a pass, with the masks of forward."""
    again = Counter(c.block for c in own.calls if c.in_backward)
    masks = {c.mask for c in own.calls if not c.in_backward}
    if any(n > own.scene.passes for n in again.values()):
        yield (
            LATE
            if len(again) == 1
            else (f"in backward blocks ran {dict(again)} times: once each is enough", "one second run for each use")
        )
    if any(c.in_backward and c.mask not in masks for c in own.calls):
        yield (
            "dropout draws another mask in the second run: gradients belong to a pass that never was",
            "leave preserve_rng_state as it is: True",
        )


def _budget(own: Run, budget: int) -> Iterator[Finding]:
    again = {c.block for c in own.calls if c.in_backward}
    total, over = len(own.scene.hidden), own.scene.over
    if own.kept_bytes > budget + SLACK * max(1, len(again)):
        more = "no block runs again" if not again else f"blocks {sorted(again)} of 0 to {total - 1} run again"
        yield (
            f"{own.kept_bytes / 1e3:.0f} kB are kept for backward, the budget is {budget / 1e3:.0f} kB: {more}",
            "leave out the largest of kept_bytes until the rest fits",
        )
    if len(again) > over:
        exact = ". A budget that is met exactly is met: <=, not <" * (own.scene.room == 0 and len(again) == over + 1)
        all_of_them = "every block runs" if len(again) == total else f"{len(again)} blocks run"
        yield (
            f"{all_of_them} a second time, and {over or 'none'} would be enough{exact}",
            "the largest of kept_bytes first: the fewest blocks free the most",
        )


def _gradients(own: Run, right: Run) -> Iterator[Finding]:
    names = ["x", *(f"parameter {i}" for i in range(len(right.gradients)))]
    pairs = list(zip(names, [own.x_grad, *own.gradients], [right.x_grad, *right.gradients], strict=True))
    missing = [name for name, got, want in pairs if got is None and want is not None]
    if missing and missing[0] == "x":
        yield (
            "x gets no gradient, and all layers before this stack would stay as they are: what runs under "
            "no_grad, or "
            "detached, is cut off",
            "checkpoint(block, x, use_reentrant=False)",
        )
    if missing:
        yield (
            f"{len(missing)} parameters get no gradient: use_reentrant=True gives none where x needs none",
            "use_reentrant=False",
        )
    for name, got, want in pairs:
        if want is not None and not torch.allclose(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item()):
            cosine = (got.flatten() @ want.flatten() / (got.norm() * want.norm())).item()
            yield (
                f"the gradient of {'x' if name == 'x' else 'the parameters'} is wrong (cosine {cosine:.2f} "
                f"with that of "
                "the plain stack)",
                "the same blocks, in the same order, with the same dropout",
            )


def _random(own: Run, right: Run) -> Iterator[Finding]:
    if own.drawn != right.drawn:
        yield (
            "after the stack torch draws other random numbers than after the plain one: the second run has "
            "moved, or "
            "set back, its random state",
            "with torch.random.fork_rng(devices=[]): around the second run; checkpoint() does it by itself",
        )
