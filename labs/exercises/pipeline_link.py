"""What connects the stages of exercise 06.1: simulated, where a dead-lock is seen at once, or real, between ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.exercises.pipeline_threads import Stopped
from labs.kit.check import Mistake

CARRIES = {1: "activation", -1: "gradient"}
"""What goes to the next stage, and what comes back."""
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

    def __init__(self, stage: int, stages: int, micro_batches: int) -> None:
        self.first, self.last = stage == 0, stage == stages - 1
        self._stage, self._stages, self._micro_batches = stage, stages, micro_batches
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
            hints = {"first": "the first stage takes x from micro_batches, and its own gradient goes nowhere",
                     "last": "the last stage computes the loss, and backward() starts there without a gradient"}  # fmt: skip
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


@dataclass(frozen=True)
class Wait:
    """A stage that waits for a neighbour."""

    stage: int
    sends: bool
    to: int
    nth: int

    @property
    def neighbour(self) -> int:
        """The other stage."""
        return self.stage + (self.to if self.sends else -self.to)

    @property
    def pair(self) -> tuple[int, int]:
        """Sender and receiver."""
        return (self.stage, self.neighbour) if self.sends else (self.neighbour, self.stage)


class Exchange:
    """Hands messages from thread to thread, and knows when all wait for each other."""

    def __init__(self, stages: int) -> None:
        self.changed = threading.Condition()
        self.running = set(range(stages))
        self.parcels: dict[tuple[int, int], Tensor] = {}
        self.waits: dict[int, Wait] = {}
        self.stopped = False
        self.stuck: dict[int, Wait] | None = None
        """Who waited for whom when nothing could go on any more."""

    def put(self, wait: Wait, tensor: Tensor) -> None:
        """Give a tensor to the neighbour, and return when it has taken it."""
        with self.changed:
            self.parcels[wait.pair] = tensor
            self._wait(wait)

    def take(self, wait: Wait) -> Tensor:
        """The tensor that the neighbour gives."""
        with self.changed:
            self._wait(wait)
            tensor = self.parcels.pop(wait.pair)
            self.changed.notify_all()
            return tensor

    def leave(self, stage: int) -> None:
        """`stage` has ended."""
        with self.changed:
            self.running.discard(stage)
            self._look_for_dead_lock()

    def stop(self) -> None:
        """End all waiting: Stopped is raised there."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def _wait(self, wait: Wait) -> None:
        self.waits[wait.stage] = wait
        self.changed.notify_all()
        self._look_for_dead_lock()
        self.changed.wait_for(lambda: self.stopped or self._can_go(wait))
        del self.waits[wait.stage]
        if self.stopped:
            raise Stopped

    def _can_go(self, wait: Wait) -> bool:
        return (wait.pair in self.parcels) != wait.sends

    def _look_for_dead_lock(self) -> None:
        waits = [self.waits.get(s) for s in self.running]
        if self.running and not self.stopped and not any(w is None or self._can_go(w) for w in waits):
            self.stuck, self.stopped = dict(self.waits), True
            self.changed.notify_all()


class SimulatedLink(Link):
    """A link to stages in other threads of this process."""

    def __init__(self, stage: int, stages: int, micro_batches: int, exchange: Exchange) -> None:
        super().__init__(stage, stages, micro_batches)
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


def dead_lock(waits: dict[int, Wait], micro_batches: int) -> Mistake:
    """Two neighbours that wait for each other, or one that waits for a stage that has ended, in words."""
    for wait in waits.values():
        other = waits.get(wait.neighbour)
        if other is not None and other.neighbour != wait.stage:
            continue  # it waits for a third: that one's case is the cause
        if other is None:
            return _waits_for_one_that_ended(wait, micro_batches)
        mine, theirs = (_doing(w, micro_batches) for w in (wait, other))
        said = f"dead-lock: stage {wait.stage} {mine}, while stage {other.stage} {theirs}"
        if wait.sends and other.sends:
            return Mistake(
                f"{said}; a send ends when the other side receives, and neither does",
                "where one of two neighbours sends, the other must receive: all forwards on every stage, then all "
                "backwards",
            )
        return Mistake(f"{said}; neither sends", "send what the neighbour needs before you wait for its answer")
    return Mistake("dead-lock: all stages wait for each other")


def _doing(wait: Wait, m: int) -> str:
    return f"{'sends' if wait.sends else 'waits for'} {CARRIES[wait.to]} {wait.nth} of {m}"


def _waits_for_one_that_ended(wait: Wait, m: int) -> Mistake:
    said = f"stage {wait.stage} {_doing(wait, m)} for ever: stage {wait.neighbour} has ended"
    if wait.sends:
        return Mistake(said, "as many receives on one side as sends on the other: one for each micro-batch")
    hints = {1: "every stage but the last: link.send_next(y.detach()) for each micro-batch",
             -1: "every stage but the first: after backward() link.send_previous(x.grad) for each micro-batch"}  # fmt: skip
    return Mistake(f"{said} without sending it", hints[wait.to])
