"""Trace a training step on tensors without storage."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from labs.common.memory.recomputation import recompute
from labs.common.oracle import fake, internals
from labs.common.oracle.internals import CudaRules, FakeTensorMode
from labs.common.oracle.trace import Trace
from labs.common.oracle.tracker import CUDA_BLOCK_BYTES, Tracker
from labs.common.precision import amp
from labs.kit.errors import BadInput, require

# Constructors by name. foreach, which handles all parameters at once, is torch's default on a GPU.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=1e-3, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.AdamW(p, lr=1e-4, foreach=foreach),
    "fused_adam": lambda p, foreach: torch.optim.AdamW(p, lr=1e-4, fused=True),  # no copies of all parameters at once
}


@dataclass(frozen=True)
class Conditions:
    """Conditions of a training step; everything else is as in labs.common.precision.amp.train_step."""

    optimizer: Literal["sgd", "momentum", "adam", "fused_adam"] = "sgd"
    """SGD, SGD with momentum, AdamW, or AdamW(fused=True)."""
    precision: str = "fp32"
    """One of labs.common.precision.amp.FORMATS; 16-bit ones use autocast."""
    policy: str = "none"
    """Which activations to recompute: a policy of labs.common.memory.recomputation."""
    micro_batches: int = 1
    """Parts of the batch whose gradients are accumulated."""
    target: Literal["cpu", "cuda"] = "cpu"
    """Whose rules apply. cuda needs no GPU: CUDA's autocast, dropout, attention and foreach optimizers, and sizes in
    multiples of 512 bytes.
    """
    max_norm: float | None = None
    """Clip the gradient to this norm."""
    set_to_none: bool = True
    """False: zero_grad fills gradients with 0 instead of dropping them, so they also exist during forward."""

    def __post_init__(self) -> None:
        require(
            self.optimizer in OPTIMIZERS,
            f"there is no optimizer {self.optimizer!r}: take one of {', '.join(OPTIMIZERS)}",
        )
        require(
            self.precision in amp.FORMATS,
            f"there is no format {self.precision!r}: take one of {', '.join(amp.FORMATS)}",
        )
        require(self.micro_batches >= 1, f"micro_batches must be at least 1, not {self.micro_batches}")
        require(self.target in ("cpu", "cuda"), f"target must be cpu or cuda, not {self.target!r}")

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make an optimizer for the trainable parameters of `module`."""
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[self.optimizer](trained, self.target == "cuda")
        if not self.set_to_none:
            zero_grad = optimizer.zero_grad
            optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
        return optimizer

    def parts(self, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Split the batch into micro-batches, which are views."""
        n = self.micro_batches
        require(len(x) >= n, f"{len(x)} rows cannot be cut into {n} micro-batches")
        return list(zip(x.tensor_split(n), y.tensor_split(n), strict=True))


def step(source: fake.Source, rows: int, **conditions: Any) -> Trace:
    """Trace the second training step of a model on `rows` rows, without computing or allocating anything.

    `source` is a factory, its name (as in labs.models.build) or a workload; `conditions` are the fields of Conditions.
    Excludes workspace inside kernels (mainly cuDNN's and cuBLAS's), the CUDA context, fragmentation, and GradScaler's
    three numbers. BadInput says in one line why a model can't be traced.
    """
    return Model(source, **conditions).step(rows)


class Model:
    """A model without storage whose steps can be traced, for any number of batches."""

    def __init__(self, source: fake.Source, **conditions: Any) -> None:
        """Take `source` and `conditions` as `step` does."""
        self.name, self.conditions = fake.name_of(source), Conditions(**conditions)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.workload = fake.made(source)
        self.module = fake.without_memory(self.workload.module, self.mode)
        recompute(self.module, self.conditions.policy)
        require(
            any(p.requires_grad for p in self.module.parameters()),
            f"the module of {self.name!r} has no parameter that requires a gradient",
        )
        self.optimizer: torch.optim.Optimizer | None = None  # made with the first step
        self.peaks: dict[int, int] = {}  # peak bytes by rows, of traced steps

    def step(self, rows: int) -> Trace:
        """Trace one step on `rows` rows after another step, so that optimizer state and old gradients exist."""
        require(rows >= 1, f"rows must be at least 1, not {rows}")
        with no_collection(), _one_line(self.name):
            x, y = fake.batch_of(self.workload, rows, self.mode)
            with self.mode:
                short = self.optimizer is None and self.conditions.set_to_none
                if self.optimizer is None:
                    self.first_step(x, y, short)
                tracker = self._tracked(x, y)
                if short and any(p.requires_grad and p.grad is None for p in self.module.parameters()):
                    self.first_step(x, y)
                    tracker = self._tracked(x, y)
        trace = Trace(tracker.events(), rows, self.name, dataclasses.asdict(self.conditions))
        self.peaks[rows] = trace.peak_bytes
        return trace

    def first_step(self, x: Tensor, y: Tensor, short: bool = False) -> None:
        """Run the step before the traced one. `short`: only its end, as if every parameter had received a gradient."""
        self.module.zero_grad()
        self.optimizer = self.conditions.make_optimizer(self.module)
        if not short:
            return self.run(x, y, Tracker())
        for p in self.module.parameters():
            p.grad = torch.empty_like(p) if p.requires_grad else None
        self.optimizer.step()

    def _tracked(self, x: Tensor, y: Tensor) -> Tracker:
        tracker = Tracker(CUDA_BLOCK_BYTES if self.conditions.target == "cuda" else 1)
        self._hold(tracker, x, y)
        tracker.begin("forward")  # zero_grad comes first
        with tracker:
            self.run(x, y, tracker)
        return tracker

    def _hold(self, tracker: Tracker, x: Tensor, y: Tensor) -> None:
        """Register with the tracker what exists before the step."""
        parameters = list(self.module.parameters())
        tracker.hold(parameters, "parameters")
        tracker.hold((p.grad for p in parameters if p.grad is not None), "gradients")
        tracker.hold(self._states(), "optimizer")
        tracker.hold([x, y, *fake.other_tensors(self.module)], "inputs/buffers")

    def _states(self) -> Iterator[Tensor]:
        """Yield the optimizer's state on the device: on a GPU, Adam's step counter stays in CPU memory."""
        for state in self.optimizer.state.values():
            for name, t in state.items():
                if isinstance(t, Tensor) and not (name == "step" and self.conditions.target == "cuda"):
                    yield t

    def run(self, x: Tensor, y: Tensor, tracker: Tracker) -> None:
        """Run labs.common.precision.amp.train_step and report its phases to `tracker`."""
        c, rules = self.conditions, None
        if c.target == "cuda":
            rules = _Rules(amp.LOWERED.get(c.precision))
            tracker.on_repeated = rules.copies.clear  # as autocast does when the second run leaves it
        run = _Phases(self.module, self.workload.loss, tracker, rules)
        name = c.precision if rules is None else "fp32"
        amp.train_step(run, run.loss, c.parts(x, y), self.optimizer, name, run, c.max_norm)


class _Rules(CudaRules):
    """CUDA's rules; in backward, only for recomputation."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if internals.in_backward() and not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class _Phases(nn.Module):
    """A model, its loss and a GradScaler for train_step, which report the next phase to `tracker`."""

    def __init__(self, module: nn.Module, loss: Callable, tracker: Tracker, rules: CudaRules | None) -> None:
        super().__init__()
        self.module, self.own_loss, self.tracker, self.rules = module, loss, tracker, rules

    def forward(self, x: Tensor) -> Any:
        self.tracker.begin("forward")
        with self.rules or nullcontext():
            return self.module(x)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        with self.rules or nullcontext():
            loss = self.own_loss(output, target)
        if self.rules is not None:
            self.rules.copies.clear()
        return loss

    def scale(self, loss: Tensor) -> _Phases:
        self.scaled = loss
        return self

    def backward(self) -> None:
        self.tracker.begin("backward")
        with self.rules or nullcontext():
            internals.backward(self.__dict__.pop("scaled"))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_phase()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer_phase()
        optimizer.step()

    def _optimizer_phase(self) -> None:
        grads = (p.grad for p in self.parameters() if p.grad is not None)
        self.tracker.hold(grads, "gradients")
        self.tracker.begin("optimizer")

    def update(self) -> None: ...


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would free cycles at arbitrary moments."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    try:
        with internals.quiet():
            yield
    except BadInput:
        raise
    except internals.NEEDS_VALUES as e:
        hint = "look for .item(), int(tensor), `if tensor:` or a mask as an index in its forward or loss"
        why = f"{e.func} needs numbers, and there are only shapes: {hint}"
        raise BadInput(f"model {name!r} cannot be traced: {why}") from e
    except Exception as e:
        raise BadInput(f"a step of model {name!r} cannot be traced: {fake.one_line(e)}") from e
