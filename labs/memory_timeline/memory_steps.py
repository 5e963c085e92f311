"""Track memory over several training steps by category: what each step leaves behind, and which line allocated it."""

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
POINTS = 30  # per step of the curve
Loop = Callable[[Job], Iterator[None]]


class StepHistory(History):
    """Records the history of an unmodified loop: autograd and the optimizer reveal the current phase."""

    def __init__(self, root: CodeType, job: Job, rounding: int = 1) -> None:
        """`root` is where stacks end; sizes are rounded up to multiples of `rounding` bytes."""
        super().__init__(root)
        self.rounding, self.updating = rounding, False
        self.parameters = list(job.workload.module.parameters())
        states = (t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        self.hold(self.parameters, "parameters")
        self.hold(states, "optimizer")
        self.hold(itertools.chain(job.workload.module.buffers(), *job.batches), "inputs/buffers")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handle each operation; PyTorch calls this with the mode switched off."""
        phase = "backward" if internals.in_backward() else "optimizer" if self.updating else "forward"
        was = self.segments[-1].phase
        if phase != was:
            if was == "backward":
                self.hold((p.grad for p in self.parameters if p.grad is not None), "gradients")
            self.begin(phase)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Switch the mode on, with hooks on every optimizer that mark the start and end of its step."""
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
    """Bytes of tensors during a loop's steps, including those that existed before."""

    after: dict[str, list[int]]
    """Bytes alive after each step, by category."""
    peak: list[int]
    """Peak bytes of each step, all categories together."""
    curve: dict[str, list[int]]
    """Bytes by category at several moments of each step; each is the fullest moment of its interval."""
    moments: list[float]
    """Moments of the curve, in steps: 2.5 is the middle of the third step, counted in allocations."""
    site: Site | None
    """Code that allocated most of the bytes held at the end of the loop; None if it holds nothing."""
    share: float
    """Share of those bytes that the line of `site` allocated."""


def watch(job: Job, loop: Loop) -> Watched:
    """Run the unmodified `loop`, a generator that does one step of `job` at a time, to its end."""
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
    """Return the generator that `loop` creates. BadInput if it doesn't yield."""
    running = loop(job)
    require(
        isgenerator(running),
        f"{getattr(loop, '__name__', loop)}(job) must yield after each step: it returned {type(running).__name__}",
    )
    return running


def one_step(running: Generator[None], done: int, steps: int) -> None:
    """Run the next step. BadInput if the loop ended before it used all batches of its job."""
    if next(running, END) is END:
        raise BadInput(f"the loop ended after {done} of {steps} steps: do one step for each of job.batches, and yield")


def _of_moves(history: StepHistory, before: int, ends: list[int]) -> Watched:
    """Replay the allocations; categories are known only now, at the end."""
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
    """Return growth per step from the second step to the last; the first may create lasting state, as Adam's."""
    return (values[-1] - values[1]) / (len(values) - 2)


def expected_growth(job: Job, name: str) -> int | None:
    """Return the bytes that a step of one of leaks.LOOPS should leave behind, without a tracker; None for other loops.

    Counts what autograd saves with autograd's hooks, and the rest by tensor sizes.
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
    """Return (line, bytes) below `root` that the GPU's allocator blames for what `loop` still holds.

    Writes the snapshot to `path` for pytorch.org/memory_viz, which works locally without uploading the file.
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
    """Return ("file:line", bytes) of the line below folder `root` with the most live bytes in a CUDA memory snapshot.

    ("", 0) if no block has such a line.
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
