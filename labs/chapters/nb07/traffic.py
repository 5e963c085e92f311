"""What a learner's code hands to torch.distributed, noted on a rank: messages with what they wait for, and bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.kit import _compat, answers

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce", "send")
TWO_BUFFERS = (
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
)
"""Methods of ProcessGroup by the place of the tensors that a rank gives: the first argument, or the second."""
Event = tuple
"""("send", message, to, tag, numbers), ("sent", message) when it was waited for, ("got", from, tag)."""


def _limit() -> timedelta:
    """For a message: the group's own limit does not hold for it."""
    return timedelta(seconds=answers.WAIT_S)


@contextmanager
def _patched(methods: dict[str, Callable]) -> Iterator[None]:
    """Every collective and message of this process ends in a method of ProcessGroup, whatever it was imported as."""
    real = {name: getattr(dist.ProcessGroup, name) for name in methods}
    for name, method in methods.items():
        setattr(dist.ProcessGroup, name, method)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(dist.ProcessGroup, name, method)


@contextmanager
def bytes_noted() -> Iterator[list[tuple[str, int]]]:
    """Within, (method, bytes of the tensors that this rank gives) of each collective and each message sent."""
    noted: list[tuple[str, int]] = []

    def counting(name: str, place: int) -> Callable:
        real = getattr(dist.ProcessGroup, name)

        def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            noted.append((name, _nbytes(args[place])))
            return real(group, *args, **kwargs)

        return method

    places = dict.fromkeys(IN_PLACE, 0) | dict.fromkeys(TWO_BUFFERS, 1)
    with _patched({name: counting(name, k) for name, k in places.items() if hasattr(dist.ProcessGroup, name)}):
        yield noted


def _nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_nbytes, tensors))


class Sent:
    """The work of a send, with a note of when it was waited for, and whether the tensor was changed before."""

    def __init__(self, work: dist.Work, tensor: Tensor, number: int, notes: Notes) -> None:
        self.work, self.tensor, self.before, self.number, self.notes = work, tensor, tensor.clone(), number, notes
        self.waited = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self.waited:
            return True
        self.waited, done = True, self.work.wait(*args or [_limit()], **kwargs)
        self.notes.events.append(("sent", self.number))
        self.notes.changed |= not torch.equal(self.tensor, self.before)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Receipt:
    """The work of a receive. What arrives is in its tensor after wait(), and surely not before."""

    def __init__(self, work: dist.Work, tensor: Tensor, arrives: Tensor, tag: int, notes: Notes) -> None:
        self.work, self.tensor, self.arrives, self.tag, self.notes = work, tensor, arrives, tag, notes
        self.waited = False

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if self.waited:
            return True
        self.waited, done = True, self.work.wait(*args or [_limit()], **kwargs)
        self.tensor.copy_(self.arrives)
        self.notes.events.append(("got", _compat.source_rank(self.work), self.tag))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


class Notes:
    """What one rank did with messages."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.works: list[Sent | Receipt] = []
        self.collectives: list[str] = []
        self.changed = False
        """Whether a tensor was changed while it was being sent."""

    @property
    def forgotten(self) -> int:
        """Messages that nobody waited for."""
        return sum(not w.waited for w in self.works)


@contextmanager
def messages_noted() -> Iterator[Notes]:
    """Within, messages are noted; what arrives is held back until it is waited for, so that a race shows each time."""
    notes, real = Notes(), {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv", "recv_anysource")}

    def send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> Sent:
        number = len(notes.works)
        notes.events.append(("send", number, to, tag, tensors[0].numel()))
        notes.works.append(Sent(real["send"](group, tensors, to, tag), tensors[0], number, notes))
        return notes.works[-1]

    def receive(name: str) -> Callable:
        def method(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Receipt:
            held = torch.empty_like(tensors[0]) if tensors[0].is_contiguous() else tensors[0]  # gloo refuses the others
            work = real[name](group, [held], *args)
            notes.works.append(Receipt(work, tensors[0], held, args[-1], notes))
            return notes.works[-1]

        return method

    def noting(name: str) -> Callable:
        real_one = getattr(dist.ProcessGroup, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            notes.collectives.append(name)
            return real_one(*args, **kwargs)

        return method

    others = [n for n in (*IN_PLACE, *TWO_BUFFERS) if n != "send" and hasattr(dist.ProcessGroup, n)]
    own = {"send": send, "recv": receive("recv"), "recv_anysource": receive("recv_anysource")}
    with _patched(own | {name: noting(name) for name in others}):
        yield notes
    for work in notes.works:  # or they would be taken for the next ones
        if not work.waited:  # to wait twice for a send of gloo is to wait for ever
            work.work.wait()


def rounds(logs: Sequence[Sequence[Event]]) -> int:
    """The fewest rounds in which these messages of each rank can travel, if in one round a rank sends one and gets one.

    A message starts when its sender has waited for all that it waited for before, and takes one round.
    """
    places, clock = [0] * len(logs), [0] * len(logs)
    busy_out, busy_in = [0] * len(logs), [0] * len(logs)  # until when a rank's way out and in are taken
    ends: dict[tuple[int, int], int] = {}
    on_the_way: dict[tuple[int, int, int], deque[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank, log in enumerate(logs):
            while places[rank] < len(log):
                what, *about = log[places[rank]]
                if what == "send":
                    number, to, tag, _ = about
                    start = max(clock[rank], busy_out[rank])
                    busy_out[rank] = ends[rank, number] = start + 1
                    on_the_way.setdefault((rank, to, tag), deque()).append(start)
                elif what == "sent":
                    clock[rank] = max(clock[rank], ends[rank, about[0]])
                else:
                    waiting = on_the_way.get((about[0], rank, about[1]))
                    if not waiting:
                        break  # its sender has not come so far yet
                    busy_in[rank] = max(waiting.popleft(), busy_in[rank]) + 1
                    clock[rank] = max(clock[rank], busy_in[rank])
                places[rank] += 1
                moved = True
    return max([*clock, *busy_out])
