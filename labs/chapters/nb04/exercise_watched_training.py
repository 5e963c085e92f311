"""A small model, its optimizer and its GradScaler that record what a training step does with them, and when."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
FEATURES, HIDDEN, OUTPUTS = 6, 8, 3


@dataclass(frozen=True, eq=False)
class Event:
    """One call, and how things stood at its start."""

    what: str
    """ "forward", "backward", "scale", "unscale_", "scaler.step", "optimizer.step" or "update"."""
    autocast: torch.dtype | None
    """The format of the autocast that is active on the CPU, if one is."""
    grads: Tensor
    """All gradients as one vector; zeros for parameters without."""
    accumulated: Tensor
    """What backward passes left there: another vector, if something else has changed the gradients since."""
    by_scaler: bool
    """Whether scaler.step() made this call, not the learner."""
    rows: int = 0

    @property
    def touched(self) -> bool:
        return not torch.allclose(self.grads, self.accumulated, equal_nan=True)


class Watched:
    """What `train_step` gets; `events` holds the calls of the latest step."""

    def __init__(self, seed: int, scale: float) -> None:
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.autocast_elsewhere = False
        """Whether the model ran inside an autocast that is for another kind of device than its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = _Model(self)
        self.accumulated: dict[int, Tensor] = {}
        for i, p in enumerate(self.model.parameters()):
            p.register_post_accumulate_grad_hook(self._remember(i))
        self.optimizer = _SGD(self, self.model.parameters(), lr=0.05)
        self.scaler = _Scaler(self, scale)

    def _remember(self, i: int) -> Callable[[Tensor], None]:
        def hook(p: Tensor) -> None:
            self.accumulated[i] = p.grad.float().flatten().clone()

        return hook

    def run(self, train_step: Callable[..., Any], batches: Sequence[Batch], max_norm: float) -> Exception | None:
        """Take one step; returns what PyTorch, or an assertion in it, had to say against it."""
        self.events.clear()
        arguments = (self.model, self.optimizer, self.scaler, copy.deepcopy(list(batches)), nn.functional.mse_loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                train_step(*arguments, max_norm)
            except (RuntimeError, AssertionError) as error:
                return error
            finally:
                self.warnings = [str(w.message) for w in caught]
                self.autocast_elsewhere |= any("is not available" in w for w in self.warnings)
        return None

    def record(self, what: str, rows: int = 0) -> None:
        self.autocast_elsewhere |= torch.is_autocast_enabled("cuda")
        on, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self.events.append(
            Event(what, dtype if on else None, self.grads(), self._accumulated(), self.scaler.stepping, rows)
        )

    def grads(self) -> Tensor:
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.float().flatten().clone()
                          for p in self.model.parameters()])  # fmt: skip

    def _accumulated(self) -> Tensor:
        return torch.cat([self.accumulated.get(i, torch.zeros(p.numel()))
                          for i, p in enumerate(self.model.parameters())])  # fmt: skip

    @property
    def applied(self) -> Tensor | None:
        """The gradients that the optimizer used, if scaler.step() let it."""
        return next((e.grads for e in self.events if e.what == "optimizer.step" and e.by_scaler), None)

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.model.parameters()])


class _Noticed(torch.autograd.Function):
    """The identity, whose backward is the first thing that backward() runs."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, watched: Watched) -> Tensor:
        ctx.watched = watched
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watched.record("backward")
        return grad, None


class _Model(nn.Module):
    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
        self._watched = [watched]

    def forward(self, x: Tensor) -> Tensor:
        self._watched[0].record("forward", rows=len(x) if isinstance(x, Tensor) else 0)
        return _Noticed.apply(self.layers(x), self._watched[0])


class _SGD(torch.optim.SGD):
    def __init__(self, watched: Watched, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watched = watched

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._watched.record("optimizer.step")
        return super().step(closure)


class _Scaler(torch.amp.GradScaler):
    def __init__(self, watched: Watched, scale: float) -> None:
        super().__init__("cpu", init_scale=scale)
        self._watched, self.stepping = watched, False

    def scale(self, outputs: Any) -> Any:
        self._watched.record("scale")
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._watched.record("unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._watched.record("scaler.step")
        self.stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False

    def update(self, new_scale: Any = None) -> None:
        self._watched.record("update")
        super().update(new_scale)


@dataclass(frozen=True)
class Job:
    """So many steps with so many micro-batches each; `overflow` is the step in which a target is far too large."""

    seed: int
    micro_batches: int
    scale: float
    max_norms: tuple[float, ...]
    overflow: int | None = None

    def batches(self, step: int) -> list[Batch]:
        """Equally large micro-batches, no two alike."""
        draw = torch.Generator().manual_seed(100 * self.seed + step)
        batches = [(torch.randn(8, FEATURES, generator=draw), 3 * i + torch.randn(8, OUTPUTS, generator=draw))
                   for i in range(self.micro_batches)]  # fmt: skip
        if step == self.overflow:
            batches[len(batches) // 2][1][0, 0] = 1e8
        return batches


@dataclass(frozen=True)
class Step:
    """A step that the learner's function took, or broke off, and the one that it should have taken."""

    own: Watched
    reference: Watched
    job: Job
    max_norm: float
    scale: float
    before: Tensor
    error: Exception | None
    overflow: bool

    def all(self, what: str, by_scaler: bool = False) -> list[Event]:
        return [e for e in self.own.events if e.what == what and e.by_scaler == by_scaler]

    def forwards_before(self, event: Event) -> int:
        return sum(e.what == "forward" for e in self.own.events[: self.own.events.index(event)])
