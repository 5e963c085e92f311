"""A pipeline written out: one stage per rank, actions in schedule order, messages that overlap with computation."""

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

AHEAD = 2  # receives posted in advance, so that messages arrive while the stage still computes


Links = dict[tuple[int, str], dist.ProcessGroup]
"""(stage, "activation") sends activations from that stage to the next, (stage, "gradient") gradients back to it."""


def new_links() -> Links:
    """Create a group per pair of neighbours and direction; all ranks call this. Several pipelines may share them.

    NCCL runs a group's messages one after the other, in the order requested. In a group with several directions or
    links, a receive posted in advance would block the very send that its sender waits for, so all would wait forever.
    """
    ways = [(stage, carries) for stage in range(dist.get_world_size() - 1) for carries in ("activation", "gradient")]
    links = {(stage, carries): dist.new_group([stage, stage + 1]) for stage, carries in ways}
    # NCCL connects two ranks at their first message and waits for the other, so all must start in the same order.
    greeting = torch.zeros(1, device=_place())
    for (stage, carries), group in links.items():
        sender, receiver = (stage, stage + 1) if carries == "activation" else (stage + 1, stage)
        if dist.get_rank() == sender:
            dist.send(greeting, receiver, group)
        elif dist.get_rank() == receiver:
            dist.recv(greeting, sender, group)
    return links


def _place() -> torch.device:
    """Return where messages must be: gloo sends only host tensors, even from a GPU that ranks share."""
    nccl = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class StageFailed(RuntimeError):
    """A stage raised, or a neighbour didn't send the expected message. One line that names stage and micro-batch."""


class Pipeline:
    """This rank's stage of `model`, split at `cuts`, and its connections to the previous and next stages.

    All ranks must create it together. A stage gives its neighbour up after waiting `wait_s` for a message (on GPUs, the
    process group's limit applies). `links` lets pipelines share connections. BadInput for cuts that don't fit the model
    or the ranks.
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
        """If a list, collects every action with its start and end times."""
        self.messages = self._shapes(model.make_batch(1)[0])
        """Shape without rows, and format, of messages from each stage to the next."""
        links = new_links() if links is None else links

        def mailbox(carries: str, source: int, to: int) -> Mailbox:
            return Mailbox(carries, links.get((source, carries)), links.get((to, carries)), self)

        self.activations = mailbox("activation", self.stage - 1, self.stage)
        self.gradients = mailbox("gradient", self.stage, self.stage - 1)

    def step(self, actions: Sequence[Action], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> float | None:
        """Run forward and backward of all micro-batches; accumulate gradients; the last stage returns the loss.

        `inputs` and `targets` hold one tensor per micro-batch, with equally many rows, on the stage's device.
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
                x, y = kept.pop(i)  # now nothing else keeps this micro-batch's activations
                with self._doing(kind, i):
                    y.backward(gradient)
                if not self.first:
                    self.gradients.send(x.grad, self.stage - 1, i)
        self.activations.flush()
        self.gradients.flush()
        return float(total) if self.last else None

    def _expect(self, m: int, rows: int) -> None:
        """Post a step's first receives, so that no neighbour waits until its message is requested."""
        if not self.first:
            self.activations.expect(m, rows, self.stage - 1, *self.messages[self.stage - 1])
        if not self.last:
            self.gradients.expect(m, rows, self.stage + 1, *self.messages[self.stage])

    @contextlib.contextmanager
    def _doing(self, kind: str, i: int) -> Iterator[None]:
        """Record an action's start and end, and say where it was if it raises."""
        start = self.now()
        try:
            yield
        except Exception as e:
            where = f"stage {self.stage} of {self.stages} failed in the {kind} of micro-batch {i}"
            raise StageFailed(f"{where}: {type(e).__name__}: {' '.join(str(e).split())[:300]}") from e
        self.note(kind, i, start)

    def now(self) -> float:
        """Return seconds of a clock that all processes of this machine share."""
        if self.events is not None and self.device.type != "cpu":
            # Wait for the computation, not the whole device: a receive posted in advance waits for a neighbour, who may
            # wait for this stage.
            torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter()

    def note(self, kind: str, i: int, start: float, message: str = "") -> None:
        """Record an event that started at `start` and ends now."""
        if self.events is not None:
            self.events.append(Event(self.stage, kind, i, start, self.now(), message))

    def _shapes(self, x: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Find what leaves each stage but the last, by sending one row through all stages in sequence."""
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
        """Take the groups of the two links, `incoming` and `outgoing`; None at the pipeline's end."""
        self.carries, self.incoming, self.outgoing, self.pipeline = carries, incoming, outgoing, pipeline
        self.place = _place()
        self.posted: deque[tuple[Tensor, dist.Work]] = deque()
        self.sent: deque[tuple[Tensor, dist.Work]] = deque()
        self.left = self.messages_sent = self.bytes_sent = 0

    def expect(self, count: int, rows: int, source: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Expect `count` messages of `rows` rows from stage `source`; post the first receives at once."""
        self.left, self.source, self.shape, self.dtype = count, source, (rows, *shape), dtype
        for _ in range(AHEAD):
            self._post()

    def _post(self) -> None:
        if self.left:
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.place)
            self.posted.append((buffer, dist.irecv(buffer, self.source, self.incoming)))
            self.left -= 1

    def receive(self, i: int) -> Tensor:
        """Return the next message, for micro-batch `i`. StageFailed if it doesn't arrive."""
        start = self.pipeline.now()
        buffer, work = self.posted.popleft()
        self._wait(work, f"the {self.carries} of micro-batch {i} from stage {self.source}")
        self._post()
        self.pipeline.note("receive", i, start, self.carries)
        return buffer.to(self.pipeline.device)

    def send(self, tensor: Tensor, to: int, i: int) -> None:
        """Start to send `tensor` to stage `to`, without waiting."""
        start = self.pipeline.now()
        tensor = tensor.contiguous().to(self.place)
        while self.sent and self.sent[0][1].is_completed():
            self.sent.popleft()
        self.sent.append((tensor, dist.isend(tensor, to, self.outgoing)))  # a tensor must live until it is sent
        self.messages_sent += 1
        self.bytes_sent += tensor.nbytes
        self.pipeline.note("send", i, start, self.carries)

    def flush(self) -> None:
        """Wait until everything has been sent."""
        while self.sent:
            self._wait(self.sent.popleft()[1], f"a neighbour to take its {self.carries}")

    def _wait(self, work: dist.Work, what: str) -> None:
        if self.place.type == "cuda":  # with a limit NCCL would block this process; without, only the GPU's stream
            work.wait()
            return
        start = time.perf_counter()
        try:
            work.wait(datetime.timedelta(seconds=self.pipeline.wait_s))
        except RuntimeError as e:
            waited = time.perf_counter() - start
            if waited < self.pipeline.wait_s:  # a lost connection: the lost rank reports its own error
                raise
            told = f"stage {self.pipeline.stage} waited {waited:.1f} s for {what}"
            raise StageFailed(f"{told}: that stage hangs, or needs longer than wait_s={self.pipeline.wait_s:g}") from e
