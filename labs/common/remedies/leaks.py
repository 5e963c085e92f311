"""Training loops that leak memory, and how to find the leak: bytes after each step, and the line that allocated them.

Each loop is a generator that does one step at a time.
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
        """Yield every tensor that exists before the loop."""
        yield from (*self.workload.module.parameters(), *self.workload.module.buffers())
        yield from (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        for x, y in self.batches:
            yield from (x, y)

    def update(self, loss: Tensor) -> None:
        """Run the rest of a training step after its loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def clean(job: Job) -> Iterator[None]:
    """Keep one number per step (no leak)."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        loss = loss_of(module(x), y)
        job.update(loss)
        kept.append(loss.item())
        yield


def losses(job: Job) -> Iterator[None]:
    """Keep the loss tensor after backward, which has freed the graph's tensors: a scalar and the nodes remain."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        loss = loss_of(module(x), y)
        job.update(loss)
        kept.append(loss)
        yield


def outputs(job: Job) -> Iterator[None]:
    """Keep each step's predictions, for a metric at the end of the epoch."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        output = module(x)
        job.update(loss_of(output, y))
        kept.append(output)
        yield


def validation(job: Job) -> Iterator[None]:
    """Keep a validation loss without backward or no_grad: the whole graph stays, with its activations."""
    module, loss_of, kept = job.workload.module, job.workload.loss, []
    for x, y in job.batches:
        job.update(loss_of(module(x), y))
        kept.append(loss_of(module(x), y))
        yield


def hook(job: Job) -> Iterator[None]:
    """Keep the first layer's output in a forward hook."""
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
    """Prepare batches of these row counts, the middle one 12 times as large if `larger`, and run one step."""
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
    """Observations of a loop. All tensor bytes count, including the model, its optimizer and the batches."""

    live_bytes: list[int]
    """Bytes after each step, like torch.cuda.memory_allocated."""
    peak_bytes: list[int]
    """Peak so far, after each step, like torch.cuda.max_memory_allocated."""
    site: Site | None
    """Code that allocated most of the bytes that the loop still holds; None if it holds nothing."""
    share: float
    """Share of those bytes that the line of `site` allocated."""

    @property
    def growth_bytes(self) -> float:
        """Growth per step, from the first step to the last."""
        return (self.live_bytes[-1] - self.live_bytes[0]) / max(1, len(self.live_bytes) - 1)


def watch(job: Job, loop: Callable[[Job], Iterator[None]]) -> Watched:
    """Run all steps of `loop` and observe its memory."""
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
