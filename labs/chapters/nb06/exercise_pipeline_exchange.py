"""Messages between the threads of exercise 06.1, which block as real ones do, and who waits for whom in a dead-lock.

A send ends when the neighbour receives, as dist.send does on gloo.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor

from labs.chapters.nb06.exercise_pipeline_threads import Stopped
from labs.kit.check import Mistake

CARRIES = {1: "activation", -1: "gradient"}
"""What goes to the next stage, and what comes back."""


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


def dead_lock(waits: dict[int, Wait], micro_batches: int) -> Mistake:
    """Two neighbours that wait for each other, or one that waits for a stage that has ended, in words."""
    for _, wait in sorted(waits.items()):
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
    hints = {
        1: "every stage but the last: link.send_next(y.detach()) for each micro-batch",
        -1: "every stage but the first: after backward() link.send_previous(x.grad) for each micro-batch",
    }
    return Mistake(f"{said} without sending it", hints[wait.to])
