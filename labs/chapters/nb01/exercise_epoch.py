"""Exercise 01.3: train an epoch without waiting for the device; every wait that Python can see is counted."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from labs.chapters.nb01 import solutions as solution
from labs.kit._compat import TorchDispatchMode
from labs.kit.answers import number
from labs.kit.check import Mistake

ROWS = (16, 16, 16, 16, 5)
"""Samples of each batch: the last one is smaller, as in most epochs."""
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__array__", "__repr__", "__format__")
"""Methods of a tensor that need its numbers on the host."""
SAID = {
    "__float__": "float(...)",
    "__int__": "int(...)",
    "__bool__": "if ...",
    "__array__": "numpy.asarray(...)",
    "__repr__": "print(...)",
    "__format__": 'f"{...}"',
    "to_cpu": '.to("cpu")',
}
SIZED = {
    "nonzero": ".nonzero()",
    "index": "x[mask]",
    "masked_select": "masked_select()",
    "_unique2": "unique()",
    "equal": "torch.equal(...)",
    "allclose": "torch.allclose(...)",
    "bincount": "torch.bincount(...)",
    "_local_scalar_dense": "its use as a Python number",
}
"""Operators whose result has a size, or is a truth, that only the device knows: the host waits for it."""


class Watch:
    """What an answer does in its loop: reads of tensors and copies that block, by the number of steps done before."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self.steps = 0
        self.host = {_address(tensor) for batch in batches for tensor in batch}
        self.copied: set[int] = set()  # addresses of what was copied to the device
        self.reads: list[tuple[int, str]] = []
        self.blocking: list[int] = []
        self.graphs: list[weakref.ref[Token]] = []
        self.kept = 0
        self._quiet = False

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD that tells of its steps; what it reads itself does not count."""
        found = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        found.register_step_pre_hook(lambda *_: setattr(self, "_quiet", True))
        found.register_step_post_hook(self._stepped)
        return found

    def _stepped(self, *_: Any) -> None:
        self.steps, self._quiet = self.steps + 1, False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within it, tensors tell of reads and copies."""
        with contextlib.ExitStack() as stack:
            for name in READS:
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._telling(name)))
            stack.enter_context(mock.patch.object(torch.Tensor, "to", self._copying(torch.Tensor.to)))
            stack.enter_context(mock.patch.object(torch.Tensor, "copy_", self._filling(torch.Tensor.copy_)))
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))  # it is
            for module in (torch.cuda, torch.cpu, torch.mps, getattr(torch, "accelerator", torch.cuda)):
                stack.enter_context(mock.patch.object(module, "synchronize", self._synchronize))
            stack.enter_context(_Sized(self))
            yield

    def sized(self, name: str, args: tuple[Any, ...]) -> None:
        """Note an operator of SIZED; one that takes numbers of rows as index does not wait."""
        masks = [
            i for i in (args[1] if name == "index" else ()) if i is not None and i.dtype in (torch.bool, torch.uint8)
        ]
        if not self._quiet and (name != "index" or masks):
            self.reads.append((self.steps, name))

    def _synchronize(self, *_: Any, **options: Any) -> None:
        self.reads.append((self.steps, "synchronize"))

    def _telling(self, name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def told(tensor: Tensor, *args: Any, **options: Any) -> Any:
            outermost, self._quiet = not self._quiet, True  # print() reads with item() and tolist()
            if outermost:
                self.reads.append((self.steps, name))
            try:
                return method(tensor, *args, **options)
            finally:
                self._quiet = not outermost

        return told

    def _copying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            where = options.get("device", (*args, None)[0])
            back = isinstance(where, str) and where.startswith("cpu") and _address(tensor) not in self.host
            if not self._quiet and back:  # to the host, by name
                self.reads.append((self.steps, "to_cpu"))
            elif not self._quiet and (isinstance(where, torch.device | str | Tensor) or "device" in options):
                self.copied.add(_address(tensor))
                if not (options.get("non_blocking") or True in args[1:3]):
                    self.blocking.append(self.steps)
            return method(tensor, *args, **options)

        return to

    def _filling(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def copy_(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not self._quiet:
                self.copied.add(_address(source))
                if not non_blocking:
                    self.blocking.append(self.steps)
            return method(tensor, source, non_blocking)

        return copy_


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Sized(TorchDispatchMode):
    """Tells a Watch of operators whose result has a size that the host must ask for."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        if (name := func.overloadpacket.__name__) in SIZED:
            self.watch.sized(name, args)
        return func(*args, **(kwargs or {}))


class Token:
    """Lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    """The identity, with a token in its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token) -> Tensor:
        """`x` itself, of any shape."""
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient itself."""
        return gradient, None


class Model(nn.Module):
    """A linear layer, (rows, 6) to (rows, 3), that counts how many of its former graphs are still alive."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.layer, self.watch = nn.Linear(6, 3), watch

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) -> (rows, 3)."""
        self.watch.kept = max(self.watch.kept, sum(g() is not None for g in self.watch.graphs))
        token = Token()
        self.watch.graphs.append(weakref.ref(token))
        return Marked.apply(self.layer(x), token)


def check_epoch(f: Callable[..., Any]) -> None:
    """One epoch of a small model: its parameters, loss and accuracy, and what it waited for meanwhile."""
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 6, generator=draw), torch.randint(3, (n,), generator=draw)) for n in ROWS]
    batches[-1] = (batches[-1][0], torch.zeros(ROWS[-1], dtype=torch.long))  # its mean loss is unlike the others'
    watch, quiet = Watch(batches), Watch()
    torch.manual_seed(1)
    model = Model(watch)
    start = copy.deepcopy(model.layer.state_dict())
    with watch():
        answer = f(model, watch.optimizer(model), nn.functional.cross_entropy, batches, torch.device("cpu"))
    twin = Model(quiet)
    twin.layer.load_state_dict(start)
    want = solution.train_epoch(twin, quiet.optimizer(twin), nn.functional.cross_entropy, batches, torch.device("cpu"))
    _check_training(model, twin, watch, start, batches)
    _check_waits(watch, batches)
    _check_numbers(answer, want)


def _check_training(model: Model, twin: Model, watch: Watch, start: dict[str, Tensor], batches: list) -> None:
    if watch.steps != len(ROWS):
        raise Mistake(f"optimizer.step() ran {watch.steps} times for {len(ROWS)} batches", "one step for each batch")
    after = list(model.layer.parameters())
    if all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, twin.layer.parameters(), strict=True)):
        return
    added = Model(Watch())
    added.layer.load_state_dict(start)
    optimizer = Watch().optimizer(added)
    for x, y in batches:
        nn.functional.cross_entropy(added(x), y).backward()
        optimizer.step()
    if all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, added.layer.parameters(), strict=True)):
        raise Mistake(
            "the gradients are never set back: each step adds to those of all steps before it",
            "optimizer.zero_grad() in every step",
        )
    raise Mistake(
        "after the epoch the parameters are not those of plain training on these batches, in this order",
        "zero_grad, forward, loss, backward, step: nothing else changes the parameters",
    )


def _check_waits(watch: Watch, batches: list[tuple[Tensor, Tensor]]) -> None:
    last = len(ROWS)
    if inside := [name for step, name in watch.reads if step < last]:
        if inside[0] == "synchronize":
            raise Mistake(
                "synchronize() was called while steps were still to come: it waits until the device has done "
                "all that is queued",
                "leave it out: reading the sums after the loop waits",
            )
        name = (SAID | SIZED).get(inside[0], f".{inside[0]}()")
        raise Mistake(
            f"{len(inside)} times a tensor's number was needed while steps were still to come, first by "
            f"{name}: each waits until the device has done all that is queued",
            "add up tensors on the device; read the sum once, after the loop",
        )
    x, y = (sum(_address(batch[k]) in watch.copied for batch in batches) for k in (0, 1))
    if x + y < 2 * last:
        left = "the loss would not find y, left on the host" if x == last else "the model would not find its input"
        raise Mistake(
            f"{x + y} tensors were copied to the device, of {2 * last}: on a GPU {left}",
            "x.to(device, non_blocking=True), and y, too",
        )
    if late := [step for step in watch.blocking if 0 < step < last]:
        raise Mistake(
            f"{len(late)} copies were blocking while a step was in the queue: each waits until it is done",
            "the batches lie in pinned memory: .to(device, non_blocking=True)",
        )
    if watch.kept > 2:
        raise Mistake(
            f"{watch.kept} graphs of former steps were still alive: their activations fill the memory",
            "add up loss.detach(): a sum of losses with their graphs keeps them all",
        )


def _check_numbers(answer: Any, want: tuple[float, float]) -> None:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Mistake(f"you return {answer!r:.60}, not two numbers", "return mean_loss, accuracy")
    loss, accuracy = (number(a, "0.75") for a in answer)
    rows = sum(ROWS)
    if math.isclose(loss, want[1], rel_tol=1e-4):
        raise Mistake("you return the accuracy first, then the mean loss", "return mean_loss, accuracy")
    if not math.isclose(loss, want[0], rel_tol=1e-4):
        if math.isclose(loss, want[0] * rows, rel_tol=1e-4):
            raise Mistake("your loss is the sum over the samples", f"divide by the {rows} samples")
        if math.isclose(loss, want[0] * rows / len(ROWS), rel_tol=1e-4):
            raise Mistake(
                f"your loss is the sum over the {rows} samples, divided by the {len(ROWS)} batches",
                f"divide by the {rows} samples",
            )
        raise Mistake(
            f"your mean loss is {loss:.4f}; over the {rows} samples of this epoch it is {want[0]:.4f}",
            "the last batch is smaller: weigh the mean loss of each batch by its samples",
        )
    if not math.isclose(accuracy, want[1], rel_tol=1e-4):
        if any(math.isclose(accuracy, want[1] * times, rel_tol=1e-4) for times in (100, rows, rows / len(ROWS))):
            raise Mistake(f"your accuracy is {accuracy:g}, not a share", "right ones over samples, from 0 to 1")
        if math.isclose(accuracy, 1 - want[1], rel_tol=1e-4):
            raise Mistake(f"your accuracy, {accuracy:.4f}, is the share of wrong answers", "count where they are equal")
        raise Mistake(
            f"your accuracy is {accuracy:.4f}; of the {rows} samples of this epoch it is {want[1]:.4f}",
            "count the right ones of all batches, by the output before the step",
        )
