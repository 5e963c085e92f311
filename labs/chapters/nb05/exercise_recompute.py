"""Exercise 05.2: recomputation by hand, tried on blocks that note how they are called."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from labs.chapters.nb05.exercise_states import one_thread
from labs.kit.check import Mistake

# -- the task: blocks that note how they are called, and runs of them


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
    flag_changed: bool = False
    """Whether the caller's x has another requires_grad now."""

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
        self.flag_changed = x.requires_grad != self.scene.x_needs_grad
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


# -- the checks: calls, bytes, gradients, random numbers


Finding = tuple[str, str]
"""What was done, and a hint."""


def check_checkpointed(f: Function) -> None:
    """One block to three, with and without a gradient for x, once and twice: gradients, bytes, calls, random states."""
    for scene in SCENES:
        with one_thread():
            own, plain = Run(scene).play(f), Run(scene, collect=False).play(lambda block, x: block(x))
        for what, hint in _faults(own, plain):
            raise Mistake(what if scene is SCENES[0] else f"{scene.words}: {what}", hint) from own.error
        if own.error is not None:
            raise own.error


def _faults(own: Run, plain: Run) -> Iterator[Finding]:
    yield from _calls(own, plain)
    if own.cut_off:
        yield _no_graph(own)
    yield from _errors(own)
    if own.error is None:
        yield from _recomputed(own)
        yield from _gradients(own, plain)
        yield from _random(own, plain)
        if own.flag_changed:
            yield ("the caller's x requires a gradient now: requires_grad_() works in place, and this was not your "
                   "tensor", "x = x.detach().requires_grad_(): detach() makes a tensor of its own")  # fmt: skip


def _no_graph(run: Run) -> Finding:
    if not run.scene.x_needs_grad:
        return ("the block's parameters get no gradient then: your output does not require grad, for autograd looks "
                "only at what apply() is given, not at what forward() uses",
                "Function.apply(x, *block.parameters())")  # fmt: skip
    return ("the output does not require grad: what runs under no_grad, or detached, is cut off, and nothing tells "
            "autograd how to go back", "a torch.autograd.Function whose backward runs the block again")  # fmt: skip


def _calls(own: Run, plain: Run) -> Iterator[Finding]:
    if any(c.torchs_own for c in own.calls):
        yield "torch.utils.checkpoint did it", "write it by hand, once in your life: a torch.autograd.Function"
    uses = len(own.scene.blocks)
    forward = [c for c in own.calls if not c.in_backward]
    if own.error is None and len(forward) != uses * own.scene.passes:
        yield (f"the block ran {len(forward)} times in forward, {uses * own.scene.passes} would do",
               "block(x) once, in the Function's forward")  # fmt: skip
    if own.outputs and not torch.equal(own.outputs[-1], plain.outputs[-1]):
        yield ("the output is not that of block(x) with the same seed: something drew random numbers before, or the "
               "block is in another mode", "forward() is block(x), and nothing else")  # fmt: skip
    again = any(c.in_backward for c in own.calls)
    if own.outputs and own.kept_bytes > 0.3 * plain.kept_bytes:
        why = "" if again else ": nothing is computed again"
        with_grad = ""
        if any(c.grad_enabled for c in forward):
            with_grad = "; the block ran with gradients on" + ", and your Function holds its graph" * own.is_function
        yield (f"between forward and backward you keep {own.kept_bytes / 1e3:.0f} kB beside inputs and outputs, and "
               f"block(x) keeps {plain.kept_bytes / 1e3:.0f} kB{why}{with_grad}",
               "no gradients in the first pass, and ctx.save_for_backward(x) alone")  # fmt: skip


ERRORS = [
    (r"returned an incorrect number of gradients \(expected (\d+), got (\d+)\)",
     "apply() was given {1} things, and the number of gradients that backward returns is {2}",
     "one gradient, or None, for each of them"),
    (r"element 0 of tensors does not require grad|does not require grad and does not have a grad_fn",
     "the second run recorded nothing: backward() of a Function runs without gradients",
     "with torch.enable_grad(): output = block(x)"),
    (r"differentiated Tensors does not require grad",
     "x was detached, and nobody asks for its gradient then", "x = x.detach().requires_grad_()"),
    (r"backward through the graph a second time",
     "the second run goes on into the blocks before: its x still belongs to the first graph",
     "x = x.detach().requires_grad_()"),
    (r"appears? to not have been used in the graph",
     "you ask for the gradient of a tensor that the second run did not use",
     "of the very x that block(x) got, and of block.parameters()"),
    (r"NoneType' object has no attribute|NoneType", "a value is None in your code: {0}",
     "after backward() only leaves have .grad; torch.autograd.grad returns gradients"),
]  # fmt: skip


def _errors(own: Run) -> Iterator[Finding]:
    ran = [c for c in own.calls if c.in_backward]
    for words, what, hint in ERRORS:
        if own.error is None or not (found := re.search(words, str(own.error))):
            continue
        if "recorded nothing" in what and ran and ran[-1].grad_enabled:
            what, hint = ERRORS[2][1:]
        yield what.format(str(own.error).splitlines()[0], *found.groups()), hint


def _recomputed(own: Run) -> Iterator[Finding]:
    uses = len(own.scene.blocks) * own.scene.passes
    again = [c for c in own.calls if c.in_backward]
    if len(again) != uses:
        each = f" for {uses} uses of a block" * (uses > 1)
        yield (f"in backward the block ran {len(again)} times{each}, not {uses}",
               "one second run for each use, all gradients from it")  # fmt: skip
    first = [c.mask for c in own.calls if not c.in_backward]
    if sorted(c.mask for c in again) != sorted(first):
        yield ("dropout draws another mask in the second run: gradients belong to a pass that never was",
               "keep torch.get_rng_state() in forward, and set it before the second run")  # fmt: skip


def _gradients(own: Run, plain: Run) -> Iterator[Finding]:
    names = ["x", *(f"parameter {i}" for i in range(len(plain.gradients)))]
    pairs = list(zip(names, [own.x_grad, *own.gradients], [plain.x_grad, *plain.gradients], strict=True))
    missing = [name for name, got, want in pairs if got is None and want is not None]
    if missing and missing[0] == "x":
        yield "x gets no gradient: all layers before this block would stay as they are", "return it from backward()"
    if missing and own.is_function and own.given == 1:
        yield ("the block's parameters get no gradient: apply() is given x alone, and autograd does not look into "
               "forward()", "Function.apply(x, *block.parameters())")  # fmt: skip
    if missing:
        yield ("the block's parameters get no gradient: it would never learn",
               "torch.autograd.grad(output, [x, *parameters], grad_output), and return all of them")  # fmt: skip
    for name, got, want in pairs:
        if want is not None and not torch.allclose(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item()):
            yield _wrong(own, "x" if name == "x" else "the parameters", got, want)


def _wrong(own: Run, name: str, got: Tensor, want: Tensor) -> Finding:
    ratio = (got.flatten() @ want.flatten() / want.norm() ** 2).item()
    if torch.allclose(got, ratio * want, rtol=1e-3, atol=1e-4 * want.abs().max().item()):
        if ratio > 1:
            return (f"the gradient of {name} is {ratio:.3g} times too large: it is added more than once",
                    "either backward() adds to .grad, or you return it; torch.autograd.grad adds nowhere")  # fmt: skip
        return f"the gradient of {name} is {ratio:.3g} times what it should be", "pass grad_output on as it is"
    if own.scene.passes > 1:
        return (f"the gradient of {name} is not the sum of both passes: what was in .grad is lost",
                "return gradients, and leave the adding to autograd")  # fmt: skip
    cosine = (got.flatten() @ want.flatten() / (got.norm() * want.norm())).item()
    return (f"the gradient of {name} is wrong (cosine {cosine:.2f} with that of block(x))",
            "torch.autograd.grad(output, ..., grad_output): what the loss makes of the output")  # fmt: skip


FORK = "with torch.random.fork_rng(devices=[]): what is drawn inside does not count outside"


def _random(own: Run, plain: Run) -> Iterator[Finding]:
    if own.drawn[0] != plain.drawn[0]:
        yield ("after forward torch draws another random number than after block(x)",
               "forward() is block(x), and nothing else")  # fmt: skip
    if own.drawn[1] == plain.drawn[0]:
        yield ("after backward torch draws again what it drew after forward: you set its random state back, and left "
               "it there", FORK)  # fmt: skip
    if own.drawn[1] != plain.drawn[1]:
        yield ("after backward torch draws another random number than with block(x): the second run has moved its "
               "random state", FORK)  # fmt: skip
