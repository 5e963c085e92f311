"""What exercise 06.1 is tried on: small stages that note what is done with them, and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labs.chapters.nb06.exercise_pipeline_link import Event, Link
from labs.kit.check import Mistake

WIDTHS = (6, 5, 4, 3)
OUTPUTS = 2


@dataclass(frozen=True)
class Job:
    """A model of so many stages, and a batch whose micro-batches have these rows."""

    stages: int
    rows: tuple[int, ...]
    seed: int = 0

    @cached_property
    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """(x, y) of each; the same on every call."""
        draw = torch.Generator().manual_seed(self.seed)
        return [(torch.randn(n, WIDTHS[0], generator=draw), torch.randn(n, OUTPUTS, generator=draw)) for n in self.rows]

    def modules(self) -> list[nn.Module]:
        """New stages with the same parameters on every call: linear and tanh, the last one linear."""
        widths = (*WIDTHS[: self.stages], OUTPUTS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers = [nn.Linear(widths[s], widths[s + 1]) for s in range(self.stages)]
        return [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]] + layers[-1:]

    @cached_property
    def reference(self) -> Reference:
        """What one process computes, micro-batch by micro-batch."""
        modules, parameters, passed, losses = self.modules(), [], [], []
        for x, y in self.micro_batches:
            between = [x.clone().requires_grad_()]
            for module in modules:
                between.append(module(between[-1]))
            loss = mse_loss(between[-1], y)
            weights = [p for m in modules for p in m.parameters()]
            found = torch.autograd.grad(loss, [*weights, *between[1:-1]])
            own, found = list(found[: 2 * self.stages]), found[2 * self.stages :]
            parameters.append([flat(own[2 * s : 2 * s + 2]) for s in range(self.stages)])
            passed.append([None, *found])
            losses.append(loss.item())
        return Reference(parameters, passed, losses)


@dataclass(frozen=True)
class Reference:
    """Of the mean loss of each micro-batch alone; first index: micro-batch, second: stage."""

    parameters: list[list[Tensor]]
    """Gradient of all parameters of the stage, flat."""
    inputs: list[list[Tensor | None]]
    """Gradient of what the stage receives; None for the first."""
    losses: list[float]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of the tensors in a row."""
    return torch.cat([t.detach().flatten() for t in tensors])


class Stage(nn.Module):
    """A stage that notes its forward and backward passes among the events of its link."""

    def __init__(self, module: nn.Module, number: int, job: Job, link: Link) -> None:
        super().__init__()
        self.module = module
        self._number, self._job, self._events = number, job, link._events
        self.inputs: list[Tensor] = []
        self.ran = 0
        self.kept_numbers = 0
        """What autograd keeps for backward at this moment: tensors."""
        self.kept_at_backward: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width of the stage before) -> (rows, own width)."""
        s, of = self._number, self._job.stages
        if s > 0 and any(x is own or torch.equal(x, own) for own, _ in self._job.micro_batches):
            raise Mistake(
                f"stage {s} of {of} computes with x of micro_batches, not with what stage {s - 1} sends",
                "x = link.receive_previous() on every stage but the first",
            )
        if not torch.is_grad_enabled():
            raise Mistake(f"stage {s} of {of} runs forward without gradients", "leave out torch.no_grad()")
        self.ran += 1
        i = self._micro_batch(x)
        y = self.module(x)
        self._events.append(Event("forward", number=i, tensor=y.detach()))
        if y.requires_grad:
            y.register_hook(lambda gradient: self._note_backward(i, gradient))
        return y

    def _micro_batch(self, x: Tensor) -> int:
        """Its number, in the order in which they come."""
        if (known := position(x, self.inputs)) is not None:
            return known
        self.inputs.append(x.detach())
        return len(self.inputs) - 1

    def _note_backward(self, i: int, gradient: Tensor) -> None:
        self._events.append(Event("backward", number=i, tensor=gradient.detach().clone()))
        self.kept_at_backward.append(self.kept_numbers)


class Loss:
    """mse_loss, for the last stage, with the target that belongs to each output."""

    def __init__(self, number: int, job: Job, link: Link) -> None:
        self._number, self._job, self._events = number, job, link._events

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        s, of = self._number, self._job.stages
        if s < of - 1:
            raise Mistake(
                f"stage {s} of {of} computes a loss: only the last one has the model's output",
                "a stage in the middle receives, computes and sends; ask link.last, not whether link.first is False",
            )
        forwards = [e for e in self._events if e.what == "forward"]
        i = next((e.number for e in forwards if position(output, [e.tensor]) == 0), None)
        j = position(target, [y for _, y in self._job.micro_batches])
        if None not in (i, j) and i != j:
            raise Mistake(
                f"the output of micro-batch {i + 1} is compared with the targets of micro-batch {j + 1}",
                "micro-batches arrive in the order in which they were sent",
            )
        return mse_loss(output, target)


def position(tensor: Any, among: Sequence[Tensor]) -> int | None:
    """Index of the tensor in `among` with the same numbers."""
    return next((i for i, t in enumerate(among) if isinstance(tensor, Tensor) and torch.equal(tensor, t)), None)


@dataclass
class Played:
    """One stage after the learner's function has run on it."""

    number: int
    job: Job
    link: Link
    stage: Stage
    returned: Any = None
    error: Exception | None = None

    def run(self, f: Callable[..., Any]) -> None:
        """Call it, and count what autograd keeps."""

        def pack(tensor: Tensor) -> _Kept:
            return _Kept(tensor, self.stage)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            loss = Loss(self.number, self.job, self.link)
            self.returned = f(self.stage, self.job.micro_batches, loss, self.link)

    def events(self, what: str, to: int = 0) -> list[int]:
        """Positions of these events among all of the stage."""
        return [i for i, e in enumerate(self.link._events) if (e.what, e.to) == (what, to)]

    def tensors(self, what: str, to: int = 0) -> list[Tensor]:
        """The tensors of these events."""
        return [self.link._events[i].tensor for i in self.events(what, to)]

    @property
    def gradient(self) -> Tensor | None:
        """All .grad of the stage, flat; None unless every parameter has one."""
        found = [p.grad for p in self.stage.parameters()]
        return None if any(g is None for g in found) else flat(found)


class _Kept:
    """A tensor that autograd keeps, counted as long as it does."""

    def __init__(self, tensor: Tensor, stage: Stage) -> None:
        self.tensor, self.stage = tensor, stage
        stage.kept_numbers += 1

    def __del__(self) -> None:
        self.stage.kept_numbers -= 1


def players(job: Job, connect: Callable[[int], Link]) -> list[Played]:
    """All stages of the job, each with its link."""
    links = [connect(s) for s in range(job.stages)]
    modules = job.modules()
    return [Played(s, job, links[s], Stage(modules[s], s, job, links[s])) for s in range(job.stages)]
