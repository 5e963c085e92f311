"""Training loops that hold on to memory, and what finds them: bytes after each step, and who made what is left.

Each loop is a generator that has done one more step each time it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labs.common.models import Workload
from labs.common.remedies.history import History, Site


@dataclass(frozen=True)
class Job:
    """A model, its optimizer, and a batch for each step."""

    workload: Workload
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]

    def tensors(self) -> Iterator[Tensor]:
        """All that is there before the loop."""
        yield from (*self.workload.module.parameters(), *self.workload.module.buffers())
        yield from (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        for x, y in self.batches:
            yield from (x, y)

    def update(self, loss: Tensor) -> None:
        """The rest of a training step, from its loss on."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def clean(job: Job) -> Iterator[None]:
    """Keeps a number per step."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        loss = loss_of(module(x), y)
        job.update(loss)
        kept.append(loss.item())
        yield


def losses(job: Job) -> Iterator[None]:
    """`losses.append(loss)` after backward, which has freed what the graph held: a scalar and the nodes stay."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        loss = loss_of(module(x), y)
        job.update(loss)
        kept.append(loss)
        yield


def outputs(job: Job) -> Iterator[None]:
    """Predictions of each step, kept for a metric at the end of the epoch."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        output = module(x)
        job.update(loss_of(output, y))
        kept.append(output)
        yield


def validation(job: Job) -> Iterator[None]:
    """A validation loss, kept without backward and without no_grad: the whole graph stays, with its activations."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        job.update(loss_of(module(x), y))
        kept.append(loss_of(module(x), y))
        yield


def hook(job: Job) -> Iterator[None]:
    """A forward hook that keeps what the first layer computes."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    first = next(m for m in module.modules() if not list(m.children()))
    handle = first.register_forward_hook(lambda layer, given, made: kept.append(made.detach()))
    try:
        for x, y in job.batches:
            loss = loss_of(module(x), y)
            job.update(loss)
            yield
    finally:
        handle.remove()


LARGER = "one larger batch"
LOOPS: dict[str, Callable[[Job], Iterator[None]]] = {
    "none": clean,
    LARGER: clean,
    "losses": losses,
    "outputs": outputs,
    "validation": validation,
    "hook": hook,
}
LEAKS = tuple(LOOPS)[2:]


def job(workload: Workload, rows: list[int], device: torch.device, larger: bool = False) -> Job:
    """Batches of so many rows, the one in the middle 12 times as many if `larger`; one step has been done before."""
    module = workload.module.to(device)
    if larger:
        rows = [12 * n if i == len(rows) // 2 else n for i, n in enumerate(rows)]
    batches = [tuple(t.to(device) for t in workload.make_batch(n)) for n in rows]
    made = Job(workload, torch.optim.AdamW(module.parameters(), lr=1e-4), batches)
    x, y = batches[0]
    made.update(workload.loss(module(x), y))
    return made


@dataclass(frozen=True)
class Watched:
    """What was seen of a loop. All bytes of tensors count: the model, its optimizer and the batches, too."""

    live_bytes: list[int]
    """After each step: what torch.cuda.memory_allocated says."""
    peak_bytes: list[int]
    """The most so far, after each step: what torch.cuda.max_memory_allocated says."""
    site: Site | None
    """Where most bytes come from that the loop still holds; None if it holds nothing."""
    share: float
    """Of these bytes, how many come from the line of `site`."""

    @property
    def growth_bytes(self) -> float:
        """Per step, from the first step to the last."""
        return (self.live_bytes[-1] - self.live_bytes[0]) / max(1, len(self.live_bytes) - 1)


def watch(job: Job, loop: Callable[[Job], Iterator[None]]) -> Watched:
    """Run all steps of `loop`."""
    history, running = History(watch.__code__), loop(job)
    live, peaks, now, peak, seen = [], [], 0, 0, 0
    try:
        with history:
            history.hold(job.tensors(), "before")
            for _ in job.batches:
                next(running)
                for block, sign, *_ in history.moves[seen:]:
                    now += sign * block.nbytes
                    peak = max(peak, now)
                seen = len(history.moves)
                live.append(now)
                peaks.append(peak)
        return Watched(live, peaks, *history.largest_site())
    finally:
        running.close()
