"""Memory of several training steps by category: what each step leaves behind, and the line that holds it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isgenerator
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from labs.common.memory import saved_tensors
from labs.common.oracle import internals
from labs.common.oracle.trace import CATEGORIES
from labs.common.oracle.tracker import CUDA_BLOCK_BYTES
from labs.common.remedies import leaks
from labs.common.remedies.history import History, Site
from labs.common.remedies.leaks import Job
from labs.kit import _compat
from labs.kit.errors import BadInput, require

END = object()
POINTS = 30  # of each step's curve
Loop = Callable[[Job], Iterator[None]]


class StepHistory(History):
    """History of a loop that knows nothing of it: autograd and the optimizer tell which phase it is in."""

    def __init__(self, root: CodeType, job: Job, rounding: int = 1) -> None:
        """`root`: where stacks end. `rounding`: bytes that sizes are multiples of."""
        super().__init__(root)
        self.rounding, self.updating = rounding, False
        self.parameters = list(job.workload.module.parameters())
        states = (t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        self.hold(self.parameters, "parameters")
        self.hold(states, "optimizer")
        self.hold(itertools.chain(job.workload.module.buffers(), *job.batches), "inputs/buffers")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        phase = "backward" if internals.in_backward() else "optimizer" if self.updating else "forward"
        was = self.segments[-1].phase
        if phase != was:
            if was == "backward":
                self.hold((p.grad for p in self.parameters if p.grad is not None), "gradients")
            self.begin(phase)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """With the mode on, and told by every optimizer when it begins and ends its step."""
        hooks = [
            register_optimizer_step_pre_hook(lambda *_: setattr(self, "updating", True)),
            register_optimizer_step_post_hook(lambda *_: setattr(self, "updating", False)),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True)
class Watched:
    """Bytes of tensors during the steps of a loop; what was there before them counts, too."""

    after: dict[str, list[int]]
    """By category: alive after each step."""
    peak: list[int]
    """The most of all categories together in each step."""
    curve: dict[str, list[int]]
    """By category: at some moments of each step, the fullest of its stretch."""
    moments: list[float]
    """Of the curve, in steps: 2.5 is the middle of the third one, counted in allocations."""
    site: Site | None
    """Where most bytes come from that the loop still holds at its end; None if it holds nothing."""
    share: float
    """Of these bytes, how many come from the line of `site`."""


def watch(job: Job, loop: Loop) -> Watched:
    """Run `loop`, which does one step of `job` each time that it is asked, to its end. Nothing of it is changed."""
    on_cuda = job.batches[0][0].is_cuda
    history, running, ends = (
        StepHistory(one_step.__code__, job, CUDA_BLOCK_BYTES if on_cuda else 1),
        started(loop, job),
        [],
    )
    before = len(history.moves)
    try:
        with history.watching():
            for _ in job.batches:
                history.begin("forward")
                one_step(running, len(ends), len(job.batches))
                ends.append(len(history.moves))
        return _of_moves(history, before, ends)
    finally:
        running.close()


def started(loop: Loop, job: Job) -> Generator[None]:
    """What does a step of `loop` each time that it is asked. BadInput if that does not yield."""
    running = loop(job)
    require(
        isgenerator(running),
        f"{getattr(loop, '__name__', loop)}(job) must yield after each step: it returned {type(running).__name__}",
    )
    return running


def one_step(running: Generator[None], done: int, steps: int) -> None:
    """The next step. BadInput if the loop has ended before all batches of its job."""
    if next(running, END) is END:
        raise BadInput(f"the loop ended after {done} of {steps} steps: do one step for each of job.batches, and yield")


def _of_moves(history: StepHistory, before: int, ends: list[int]) -> Watched:
    """What each category holds, move by move; categories are known now that all is over."""
    now = dict.fromkeys(CATEGORIES, 0)
    after: dict[str, list[int]] = {c: [] for c in CATEGORIES}
    curve: dict[str, list[int]] = {c: [] for c in CATEGORIES}
    peaks, moments, start = [], [], 0
    for number, end in enumerate([before, *ends]):
        width, best, most = max(1, -(-(end - start) // POINTS)), dict(now), -1
        peak = sum(now.values())
        for i in range(start, end):
            block, sign, *_ = history.moves[i]
            now[history.category(block)] += sign * block.nbytes
            if (total := sum(now.values())) > most:
                best, most = dict(now), total
            if (i - start) % width == width - 1 or i == end - 1:
                if number:
                    moments.append(number - 1 + (i + 1 - start) / (end - start))
                    for c in CATEGORIES:
                        curve[c].append(best[c])
                peak, most = max(peak, most), -1
        start = end
        if number:
            peaks.append(peak)
            for c in CATEGORIES:
                after[c].append(now[c])
    return Watched(after, peaks, curve, moments, *history.largest_site())


def slope(values: list[int] | tuple[float, ...]) -> float:
    """Growth from step to step, from the second to the last: the first may make what stays, as an optimizer's state."""
    return (values[-1] - values[1]) / (len(values) - 2)


def expected_growth(job: Job, name: str) -> int | None:
    """Bytes that a step of one of leaks.LOOPS should leave behind, counted without any tracker. None for other loops.

    What autograd saves is counted by its own hooks, the rest by the size of one tensor.
    """
    module, (x, y) = job.workload.module, job.batches[-1]
    seen: list[Tensor] = []

    def forward() -> Tensor:
        seen[:] = [output := module(x), job.workload.loss(output, y)]
        return seen[1]

    states = [*module.parameters(), *module.buffers(), x, y]
    saved = saved_tensors.count(forward, states).activations
    output, loss = (t.nbytes for t in seen)
    first = next(m for m in module.modules() if not list(m.children()))
    made: list[int] = []
    handle = first.register_forward_hook(lambda layer, given, out: made.append(out.nbytes))
    forward()
    handle.remove()
    return {"none": 0, "losses": loss, "outputs": output, "validation": saved + loss, "hook": made[0]}.get(name)


def snapshot(
    job: Job, loop: Loop, path: Path | None = None, cuda: Any = _compat, root: str = leaks.__file__
) -> tuple[str, int]:
    """(line, bytes) that the GPU's allocator blames for what `loop` still holds, of code below `root`.

    `path` gets the snapshot for pytorch.org/memory_viz, a page that works without sending the file.
    """
    running, steps = started(loop, job), len(job.batches)
    cuda.record_memory_history(max_entries=100_000)
    try:
        for done in range(steps):
            one_step(running, done, steps)
        if path:
            cuda.dump_memory(str(path))
        return largest_line(cuda.memory_snapshot(), root)
    finally:
        cuda.record_memory_history(enabled=None)
        running.close()


def largest_line(snapshot: dict, root: str) -> tuple[str, int]:
    """("file:line", bytes) that most live bytes of a memory snapshot come from, among files below folder `root`.

    `snapshot` is that of CUDA's memory history. ("", 0) if no block has such a line.
    """
    by_line: dict[str, int] = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] != "active_allocated":
                continue
            own = [f for f in block.get("frames", ()) if f["filename"].startswith(root)]
            if own:
                line = f"{own[-1]['filename'].rsplit('/', 1)[-1]}:{own[-1]['line']}"
                by_line[line] = by_line.get(line, 0) + block["size"]
    return max(by_line.items(), key=lambda item: item[1], default=("", 0))
