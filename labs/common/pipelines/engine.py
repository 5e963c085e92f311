"""A pipeline written out: one stage per rank, actions in the schedule's order, messages that overlap with computing."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from labs.common.pipelines.chains import Chain, split
from labs.common.pipelines.schedules import Action, Event
from labs.kit.errors import require
from labs.kit.rank import Rank

AHEAD = 2  # receives that are posted before they are needed: a message then arrives while the stage still computes


Links = dict[tuple[int, str], dist.ProcessGroup]
"""(stage, "activation") takes activations from that stage to the next, (stage, "gradient") gradients back to it."""


def new_links() -> Links:
    """A group for each pair of neighbours and each direction; all ranks call this. Several pipelines may share them.

    NCCL runs the messages of a group one after the other, in the order in which they were asked for. In a group with
    more than one direction, or link, a receive that was posted ahead would stand before the very send that its sender
    waits for, and all would wait for ever.
    """
    ways = [(stage, carries) for stage in range(dist.get_world_size() - 1) for carries in ("activation", "gradient")]
    links = {(stage, carries): dist.new_group([stage, stage + 1]) for stage, carries in ways}
    # NCCL connects two ranks at their first message and waits for the other: all must begin in the same order.
    greeting = torch.zeros(1, device=_place())
    for (stage, carries), group in links.items():
        sender, receiver = (stage, stage + 1) if carries == "activation" else (stage + 1, stage)
        if dist.get_rank() == sender:
            dist.send(greeting, receiver, group)
        elif dist.get_rank() == receiver:
            dist.recv(greeting, sender, group)
    return links


def _place() -> torch.device:
    """Where messages must lie: gloo sends tensors of the host only, also from a GPU that ranks share."""
    nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class StageFailed(RuntimeError):
    """A stage raised, or a neighbour did not send what was expected. One line that names stage and micro-batch."""


class Pipeline:
    """This rank's stage of `model`, cut at `cuts`, and its connections to the stages before and after.

    All ranks must make it together. `wait_s` is how long a stage waits for a message before it gives its neighbour up
    (on GPUs the process group's own limit counts); `links` are those of another pipeline, to share.
    BadInput for cuts that do not fit the model or the ranks.
    """

    def __init__(
        self, model: Chain, cuts: Sequence[int], rank: Rank, wait_s: float = 60.0, links: Links | None = None
    ) -> None:
        stages = split(model, cuts)
        require(
            len(stages) == rank.world_size,
            f"{len(stages)} stages need as many ranks, not {rank.world_size}: give {rank.world_size - 1} cuts",
        )
        self.stage, self.stages, self.device, self.wait_s = rank.rank, rank.world_size, rank.device, wait_s
        self.first, self.last = rank.rank == 0, rank.rank == rank.world_size - 1
        self.module, self.loss = stages[rank.rank].to(rank.device), model.loss
        self.events: list[Event] | None = None
        """If a list, every action is added to it with the times of its start and end."""
        self.messages = self._shapes(model.make_batch(1)[0])
        """Shape without its rows, and format, of what passes from each stage to the next."""
        links = new_links() if links is None else links

        def mailbox(carries: str, source: int, to: int) -> Mailbox:
            return Mailbox(carries, links.get((source, carries)), links.get((to, carries)), self)

        self.activations = mailbox("activation", self.stage - 1, self.stage)
        self.gradients = mailbox("gradient", self.stage, self.stage - 1)

    def step(self, actions: Sequence[Action], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float | None:
        """Forward and backward of all micro-batches: gradients end up in the module; the last stage returns the loss.

        `inputs` and `targets` hold one tensor per micro-batch, equally many rows in each, on the stage's device.
        """
        m, kept, total = len(inputs), {}, 0.0
        self._expect(m, len(inputs[0]))
        for kind, i in actions:
            if kind == "forward":
                x = inputs[i] if self.first else self.activations.receive(i).requires_grad_()
                with self._doing(kind, i):
                    y = self.module(x)
                    if self.last:
                        y = self.loss(y, targets[i]) / m  # the sum of these is the mean over the batch
                        total += y.detach()
                kept[i] = x, y
                if not self.last:
                    self.activations.send(y.detach(), self.stage + 1, i)
            else:
                gradient = None if self.last else self.gradients.receive(i)
                x, y = kept.pop(i)  # from here on nothing else keeps this micro-batch's activations
                with self._doing(kind, i):
                    y.backward(gradient)
                if not self.first:
                    self.gradients.send(x.grad, self.stage - 1, i)
        self.activations.flush()
        self.gradients.flush()
        return float(total) if self.last else None

    def message_bytes(self, stage: int, to: int, rows: int) -> int:
        """Bytes that `stage` sends to its neighbour `to` in a step of `rows` rows, whatever the micro-batches."""
        if not 0 <= to < self.stages:
            return 0
        shape, dtype = self.messages[min(stage, to)]
        return rows * torch.Size(shape).numel() * dtype.itemsize

    def _expect(self, m: int, rows: int) -> None:
        """Post the first receives of a step, so that no neighbour has to wait until its message is asked for."""
        if not self.first:
            self.activations.expect(m, rows, self.stage - 1, *self.messages[self.stage - 1])
        if not self.last:
            self.gradients.expect(m, rows, self.stage + 1, *self.messages[self.stage])

    @contextlib.contextmanager
    def _doing(self, kind: str, i: int) -> Iterator[None]:
        """Note when it began and ended, and say where it was if it raises."""
        start = self.now()
        try:
            yield
        except Exception as e:
            where = f"stage {self.stage} of {self.stages} failed in the {kind} of micro-batch {i}"
            raise StageFailed(f"{where}: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
        self.note(kind, i, start)

    def now(self) -> float:
        """Seconds of a clock that all processes of this machine share."""
        if self.events is not None and self.device.type != "cpu":
            # What was computed, not the whole device: a receive that was posted ahead waits for a neighbour, who may
            # wait for us.
            torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter()

    def note(self, kind: str, i: int, start: float, message: str = "") -> None:
        """Add an event that began at `start` and ends now."""
        if self.events is not None:
            self.events.append(Event(self.stage, kind, i, start, self.now(), message))

    def _shapes(self, x: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """What leaves each stage but the last, found by sending one row through: one stage after the other."""
        found: list = []
        for stage in range(self.stages):
            out = [None]
            if stage == self.stage:
                with self._doing("forward", 0), torch.no_grad():
                    y = self.module(x.to(self.device))
                out = [(tuple(y.shape[1:]), y.dtype)]
            dist.broadcast_object_list(out, src=stage)
            found += out
            x = torch.zeros((1, *out[0][0]), dtype=out[0][1])
        return found[:-1]


class Mailbox:
    """The messages of one direction: those this stage sends, and those it receives from one neighbour, in order."""

    def __init__(
        self, carries: str, incoming: dist.ProcessGroup | None, outgoing: dist.ProcessGroup | None, pipeline: Pipeline
    ) -> None:
        """`incoming` and `outgoing` are the groups of the two links; None at the pipeline's end."""
        self.carries, self.incoming, self.outgoing, self.pipeline = carries, incoming, outgoing, pipeline
        self.place = _place()
        self.posted: deque[tuple[Tensor, dist.Work]] = deque()
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        self.left = self.messages_sent = self.bytes_sent = 0

    def expect(self, count: int, rows: int, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """`count` messages of `rows` rows will come from stage `source`; the first are asked for at once."""
        self.left, self.source, self.shape, self.dtype = count, source, (rows, *shape), dtype
        for _ in range(AHEAD):
            self._post()

    def _post(self) -> None:
        if self.left:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.place)
            self.posted.append((buffer, dist.irecv(buffer, self.source, self.incoming)))
            self.left -= 1

    def receive(self, i: int) -> Tensor:
        """The next message, that of micro-batch `i`. StageFailed if it does not come."""
        start = self.pipeline.now()
        buffer, work = self.posted.popleft()
        self._wait(work, f"the {self.carries} of micro-batch {i} from stage {self.source}")
        self._post()
        self.pipeline.note("receive", i, start, self.carries)
        return buffer.to(self.pipeline.device)

    def send(self, tensor: Tensor, to: int, i: int) -> None:
        """Begin to send `tensor` to stage `to`, and go on without waiting."""
        start = self.pipeline.now()
        tensor = tensor.contiguous().to(self.place)
        while self.sent and self.sent[0][1].is_completed():
            self.sent.popleft()
        self.sent.append((tensor, dist.isend(tensor, to, self.outgoing)))  # a tensor must live until it is sent
        self.messages_sent += 1
        self.bytes_sent += tensor.nbytes
        self.pipeline.note("send", i, start, self.carries)

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        while self.sent:
            self._wait(self.sent.popleft()[1], f"a neighbour to take its {self.carries}")

    def _wait(self, work: dist.Work, what: str) -> None:
        if self.place.type == "cuda":  # with a limit NCCL would hold up this process; without, only the GPU's stream
            work.wait()
            return
        start = time.perf_counter()
        try:
            work.wait(datetime.timedelta(seconds=self.pipeline.wait_s))
        except RuntimeError as e:
            waited = time.perf_counter() - start
            if waited < self.pipeline.wait_s:  # a lost connection: whoever was lost has its own story
                raise
            told = f"stage {self.pipeline.stage} waited {waited:.1f} s for {what}"
            raise StageFailed(f"{told}: that stage hangs, or needs longer than wait_s={self.pipeline.wait_s:g}") from e
