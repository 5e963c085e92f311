"""What connects the stages of exercise 06.1: in threads, where a dead-lock is seen at once, or between real ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.chapters.nb06.exercise_pipeline_exchange import CARRIES, Exchange, Wait
from labs.kit.check import Mistake

MAX_DIMENSIONS = 7


@dataclass(frozen=True)
class Event:
    """What a stage did: "forward" and "backward", or "send" and "receive" with a direction; micro-batches by number."""

    what: str
    to: int = 0
    """1: towards the next stage, -1: towards the one before."""
    tensor: Tensor | None = None
    number: int = -1


class Link:
    """A stage's connection to its neighbours. Each call blocks: a send ends when the neighbour receives."""

    def __init__(self, stage: int, stages: int) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self._stage, self._stages = stage, stages
        self._events: list[Event] = []

    def send_next(self, tensor: Tensor) -> None:
        """Send an activation to the next stage."""
        self._send(tensor, 1)

    def receive_previous(self) -> Tensor:
        """The next activation from the stage before: numbers without a history."""
        return self._receive(1)

    def send_previous(self, tensor: Tensor) -> None:
        """Send the gradient of an activation to the stage that it came from."""
        self._send(tensor, -1)

    def receive_next(self) -> Tensor:
        """The gradient of an activation that was sent to the next stage."""
        return self._receive(-1)

    def _send(self, tensor: Any, to: int) -> None:
        self._check_neighbour(self._stage + to, f"sends its {CARRIES[to]}")
        self._check_message(tensor, to)
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._events.append(Event("send", to, tensor))
        self._put(tensor, to)

    def _receive(self, to: int) -> Tensor:
        self._check_neighbour(self._stage - to, f"waits for an {CARRIES[to]}" if to > 0 else "waits for a gradient")
        tensor = self._take(to)
        self._events.append(Event("receive", to, tensor.clone()))
        return tensor

    def _put(self, tensor: Tensor, to: int) -> None:
        raise NotImplementedError

    def _take(self, to: int) -> Tensor:
        raise NotImplementedError

    def _check_neighbour(self, neighbour: int, what: str) -> None:
        if not 0 <= neighbour < self._stages:
            side, has = ("before", "first") if neighbour < 0 else ("after", "last")
            hints = {
                "first": "the first stage takes x from micro_batches, and its own gradient goes nowhere",
                "last": "the last stage computes the loss, and backward() starts there without a gradient",
            }
            raise Mistake(
                f"stage {self._stage} of {self._stages} {what}, but it is the {has}: no stage is {side} it",
                f"ask link.{has}: {hints[has]}",
            )

    def _check_message(self, tensor: Any, to: int) -> None:
        if tensor is None and to < 0:
            raise Mistake(
                f"stage {self._stage} sends back None in place of a gradient: what it received does not require "
                "one, so autograd made none, and the stages before cannot train",
                "what arrives has no history: x = link.receive_previous().requires_grad_() makes x.grad appear",
            )
        if not isinstance(tensor, Tensor):
            raise Mistake(f"stage {self._stage} sends {tensor!r:.60} as its {CARRIES[to]}", "send a tensor")
        if to > 0:
            return
        shapes = [tuple(e.tensor.shape) for e in self._events if e.what == "receive" and e.to > 0]
        if shapes and tuple(tensor.shape) not in shapes:
            raise Mistake(
                f"stage {self._stage} sends back a gradient of shape {tuple(tensor.shape)} for activations of shape "
                f"{shapes[0]}",
                "the stage before needs the gradient of what it sent: x.grad of the x that was received",
            )


class SimulatedLink(Link):
    """A link to stages in other threads of this process."""

    def __init__(self, stage: int, stages: int, exchange: Exchange) -> None:
        super().__init__(stage, stages)
        self._exchange = exchange

    def _wait_for(self, sends: bool, to: int) -> Wait:
        done = sum(e.what == ("send" if sends else "receive") and e.to == to for e in self._events)
        return Wait(self._stage, sends, to, done if sends else done + 1)

    def _put(self, tensor: Tensor, to: int) -> None:
        self._exchange.put(self._wait_for(True, to), tensor)

    def _take(self, to: int) -> Tensor:
        return self._exchange.take(self._wait_for(False, to)).clone()


class RankLink(Link):
    """A link between ranks: the shape goes first, then the numbers."""

    def _put(self, tensor: Tensor, to: int) -> None:
        shape = torch.tensor([tensor.dim(), *tensor.shape] + [0] * (MAX_DIMENSIONS - tensor.dim()))
        dist.send(shape, self._stage + to)
        dist.send(tensor, self._stage + to)

    def _take(self, to: int) -> Tensor:
        shape = torch.zeros(1 + MAX_DIMENSIONS, dtype=torch.int64)
        dist.recv(shape, self._stage - to)
        dimensions, *sizes = shape.tolist()
        tensor = torch.empty(sizes[:dimensions])
        dist.recv(tensor, self._stage - to)
        return tensor
