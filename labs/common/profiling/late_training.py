"""A DDP training in which any rank can be made late, anywhere in its step, and each rank's own stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from labs.common import models
from labs.kit import measure
from labs.kit.errors import require

PHASES = ("data", "forward", "backward", "optimizer")
SLEEPING = "sleeping"
"""What a lab's `model` is by default: layers that sleep, as the host does while a device works."""


class Sleep(torch.autograd.Function):
    """Passes its input on; sleeps in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SleepingLayer(nn.Module):
    """A small linear layer that takes `ms` forward and twice as long backward, on any core: ranks may share one."""

    def __init__(self, width: int, ms: float) -> None:
        super().__init__()
        self.linear, self.ms = nn.Linear(width, width), ms

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(Sleep.apply(self.linear(x), 1e-3 * self.ms, 2e-3 * self.ms))


def build(config: Any) -> models.Workload:
    """The layers that sleep, or another model that `config.model` names. Their batch takes as long as 2 of them."""
    if config.model != SLEEPING:
        return models.build(config.model, config.seed)
    torch.manual_seed(config.seed)
    width = config.width
    module = nn.Sequential(*[SleepingLayer(width, config.layer_ms) for _ in range(config.layers)])

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        time.sleep(2e-3 * config.layer_ms)
        return torch.randn(rows, width), torch.randn(rows, width)

    return models.Workload(module, make_batch, nn.functional.mse_loss)


def require_training(config: Any) -> None:
    """BadInput unless `build` and `Training` can make something of these values."""
    for name in ("width", "layers", "batch_size"):
        require(getattr(config, name) >= 1, f"{name} must be at least 1, not {getattr(config, name)}")
    require(config.layer_ms >= 0, f"layer_ms must not be negative, not {config.layer_ms}")
    require(config.delay_ms >= 0, f"delay_ms must not be negative, not {config.delay_ms}")
    require(config.place in PHASES, f"place must be one of {', '.join(PHASES)}, not {config.place!r}")
    models.require_known(config.model, besides=[SLEEPING])


class Training:
    """A model under DDP with its optimizer and data. `hook`, if given, exchanges the buckets and gets `state`."""

    BUCKET_MB = 0.25

    def __init__(
        self,
        workload: models.Workload,
        batch_size: int,
        device: torch.device,
        hook: Callable | None = None,
        state: object = None,
    ) -> None:
        self.workload, self.batch_size, self.device = workload, batch_size, device
        self.late: Mapping[str, float] = {}
        self.ddp = DistributedDataParallel(workload.module.to(device), bucket_cap_mb=self.BUCKET_MB)
        if hook is not None:
            self.ddp.register_comm_hook(state, hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.0)
        parameters = [p for p in self.ddp.parameters() if p.requires_grad]
        parameters[len(parameters) // 2].register_post_accumulate_grad_hook(lambda _: self.delay("backward"))

    def step(self, late: Mapping[str, float]) -> dict[str, float]:
        """One training step, in which this rank sleeps `late[phase]` s. Returns the seconds of each phase.

        This is the stopwatch that most training loops have: on each rank its own.
        """
        self.late, seconds = late, {}
        with self.phase("data", seconds):
            x, y = (t.to(self.device) for t in self.workload.make_batch(self.batch_size))
        with self.phase("forward", seconds):
            self.optimizer.zero_grad()
            loss = self.workload.loss(self.ddp(x), y)
        with self.phase("backward", seconds):  # its delay is in the middle: a hook of one parameter
            loss.backward()  # returns when the gradients are averaged: waits for the last rank
        with self.phase("optimizer", seconds):
            self.optimizer.step()
        return seconds

    @contextmanager
    def phase(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """A range in the profiler's trace and an entry in `seconds`."""
        start = time.perf_counter()
        with record_function(name):
            if name != "backward":
                self.delay(name)
            yield
            measure.sync(self.device)  # or the clock would time the launch of kernels
        seconds[name] = time.perf_counter() - start

    def delay(self, name: str) -> None:
        """Sleep, if this rank is to be late here."""
        if self.late.get(name):
            time.sleep(self.late[name])
