"""A writer that is killed while it saves: what the next process finds. Writers are forked."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labs.kit import supervise, timeouts
from labs.training_checkpoint.writers import Way


def marked(step: int, size_bytes: int) -> dict[str, Tensor]:
    """A state of about `size_bytes` in 8 tensors in which every number is `step`: a mixture would be seen."""
    return {str(i): torch.full((max(1, size_bytes // 32),), float(step)) for i in range(8)}


def step_in(state: Any) -> int | None:
    """The step of a `marked` state; None if it is no state, or one of more than one step."""
    if not isinstance(state, dict) or not state:
        return None
    steps = {x for tensor in state.values() for x in tensor.unique().tolist()}
    return int(steps.pop()) if len(steps) == 1 else None


@dataclass(frozen=True)
class Kill:
    """One writer killed by SIGKILL."""

    moment: float
    """After the start of a save, as a share of how long a save takes."""
    saving: bool
    """Whether that save had not returned."""
    before: int
    """Step of the last save that had returned."""
    found: int | None
    """Step that the next process finds; None if it finds nothing that can be loaded."""
    leftovers: int
    """Files that are no checkpoints."""

    @property
    def lost(self) -> bool:
        """Whether the next process finds less than what had been saved."""
        return self.found is None or self.found < self.before


def kills(way: Way, folder: Path, count: int, size_bytes: int, seed: int) -> Iterator[Kill]:
    """`count` writers one after the other, each killed at a moment of its first save.

    Moments are drawn from a whole save's usual time. A save that was faster has returned by then: `Kill.saving` tells.
    """
    draw, saved = random.Random(seed), 0
    save_s = _save_s(way, folder, size_bytes)
    for _ in range(count):
        moment = draw.uniform(0, 1)
        arguments = (_save_on, way, folder, saved + 1, size_bytes)
        with _Progress() as progress, supervise.forked(_alone, *arguments, progress) as writer:
            progress.wait_for(saved + 1, writer)
            time.sleep(moment * save_s)
            writer.kill()
            writer.join()
            started, finished = progress.read()
        saved = max(saved, finished)
        found = step_in(way.find(folder).state)
        kill = Kill(moment, started > finished, saved, found, len(leftovers(folder)))
        yield kill
        saved = started if kill.lost else found  # numbers rise, so that no later file can stand for an earlier one
        if kill.lost:
            way.write(folder, saved, marked(saved, size_bytes))


def leftovers(folder: Path) -> list[str]:
    """Names in `folder` of files that a killed or failed writer left."""
    return [name for name in os.listdir(folder) if name.endswith(".partial")]


def _save_s(way: Way, folder: Path, size_bytes: int) -> float:
    """Median of the first saves of 5 writers: a forked process pays for its memory, so its first save is slow."""
    receive, send = multiprocessing.get_context("fork").Pipe(duplex=False)
    seconds = []
    for _ in range(5):
        with supervise.forked(_alone, _time_save, way, folder, size_bytes, send) as writer:
            seconds.append(_answer(receive, writer))
    return statistics.median(seconds)


def _time_save(way: Way, folder: Path, size_bytes: int, send: Any) -> None:
    state, start = marked(0, size_bytes), time.perf_counter()
    way.write(folder, 0, state)
    send.send(time.perf_counter() - start)


def _answer(receive: Any, writer: multiprocessing.Process) -> Any:
    """What a writer sends; RuntimeError if it ends without, or takes too long."""
    wait([receive, writer.sentinel], timeouts.CHILD_S)
    if not receive.poll():
        raise RuntimeError(f"a writer did not answer within {timeouts.CHILD_S:g} s: exit code {writer.exitcode}")
    return receive.recv()


def _save_on(way: Way, folder: Path, step: int, size_bytes: int, progress: _Progress) -> None:
    for s in range(step, step + 20):  # more than it has time for; then it ends by itself
        state = marked(s, size_bytes)
        progress.start(s)
        way.write(folder, s, state)
        progress.finish(s)


class _Progress:
    """Steps whose save was started, and finished last: in memory that a forked process shares."""

    def __enter__(self) -> _Progress:
        self.memory = mmap.mmap(-1, 16)
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()

    def start(self, step: int) -> None:
        self.memory[:8] = struct.pack("q", step)

    def finish(self, step: int) -> None:
        self.memory[8:] = struct.pack("q", step)

    def read(self) -> tuple[int, int]:
        return struct.unpack("qq", self.memory[:])

    def wait_for(self, step: int, writer: multiprocessing.Process) -> None:
        """Until the save of `step` has been started. RuntimeError if the writer ended, or does not come to it."""
        end = time.monotonic() + timeouts.CHILD_S
        while self.read()[0] < step:
            if not writer.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"the writer did not come to step {step}: exit code {writer.exitcode}")
            time.sleep(0.0002)


def _alone(function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)  # threads are not forked: OpenMP would wait for them for ever
    function(*args)
