"""The benchmark loop of an article, with its faults as switches, and what one run of it would print.

The loop is `benchmark`. Every answer is that of a process of its own that has computed nothing before: a script
that is started again pays for its first step again. One device, no DDP: parallel training is not the subject here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import statistics
import time
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from signal import SIGKILL
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import _prctl_pr_set_pdeathsig

from labs.kit.rank import Rank
from labs.parts import models
from labs.parts.timing.streams import DeviceStream, HostStream, open_stream

RUNGS = ("as printed", "synchronise", "warm up", "data outside", "median of steps")
"""Each repairs one more fault and keeps the former repairs."""
WARM_UP_STEPS = 3
ANSWER_WITHIN_S = 100.0


@dataclass(frozen=True)
class Repairs:
    """Which faults of the loop are removed. None of them: the loop as it was printed."""

    synchronise: bool = False
    """Wait for the device before the clock is read: otherwise it times the launch of the work."""
    warm_up: bool = False
    """Make some steps before the clock starts."""
    data_outside: bool = False
    """Make one batch before the clock starts and keep it on the device."""
    median_of_steps: bool = False
    """Let the device note the time after every step, and take the median, in place of total / steps."""


def repairs_of(removed: int) -> Repairs:
    """The first `removed` repairs, as RUNGS[removed] says."""
    return Repairs(*(i < removed for i in range(len(fields(Repairs)))))


def benchmark(
    workload: models.Workload, batch_size: int, steps: int, repairs: Repairs, stream: DeviceStream | HostStream
) -> float:
    """Seconds per step, as the loop would print them. What is submitted to `stream` may run later."""
    model = workload.module.to(stream.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batch() -> tuple[Tensor, Tensor]:
        x, y = workload.make_batch(batch_size)  # on the host, then copied: as the article has it
        return x.to(stream.device), y.to(stream.device)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        workload.loss(model(x), y).backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS if repairs.warm_up else 0):
        stream.submit(step, *batch())
    kept = batch() if repairs.data_outside else None
    if repairs.synchronise:
        stream.synchronize()
    start = time.perf_counter()
    stream.record_event()
    for _ in range(steps):
        stream.submit(step, *(kept or batch()))
        stream.record_event()
    if repairs.synchronise:
        stream.synchronize()
    seconds = time.perf_counter() - start
    return statistics.median(stream.laps()) if repairs.median_of_steps else seconds / steps


def article() -> models.Workload:
    """The article's own model, Linear(1000, 10): 10,010 parameters, 40 kB of gradients. It takes 32 rows."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 1000), torch.randint(10, (batch_size,))

    return models.Workload(nn.Linear(1000, 10), make_batch, nn.functional.cross_entropy)


def answers(model: str, batch_size: int, steps: int, repeats: int, rank: Rank) -> dict[int, list[float]]:
    """What `repeats` runs of each rung print, in s per step: `{removed: [one per repeat]}`, the same on all ranks.

    The ranks share the repeats. Within one, all rungs take their turn in a shuffled order, so that samples with
    the same index are pairs. Call it before this process has computed anything: its children start as it is.
    """
    import torch._dynamo  # noqa: F401  the first optimizer of each child would import it, for half a second

    mine = range(rank.rank, repeats, rank.world_size)
    found: dict[tuple[int, int], float] = {}
    for repeat in mine:
        for removed in random.Random(repeat).sample(range(len(RUNGS)), len(RUNGS)):
            found[repeat, removed] = one_answer(model, batch_size, steps, removed, rank.device)
        rank.progress(repeat + 1, repeats, "the loop, fault by fault")
    shared = {k: s for part in rank.gather(found) for k, s in part.items()}
    return {removed: [shared[i, removed] for i in range(repeats)] for removed in range(len(RUNGS))}


def one_answer(model: str, batch_size: int, steps: int, removed: int, device: torch.device) -> float:
    """What one run of the loop prints, in a new process. RuntimeError with one line if it fails or takes too long."""
    # A process that has used CUDA cannot fork; a fork server, which imports once, is a process that has not.
    context: Any = multiprocessing.get_context("fork" if device.type == "cpu" else "forkserver")
    if device.type != "cpu":
        context.set_forkserver_preload([__name__, "torch._dynamo"])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, model, batch_size, steps, removed, device)
    child = context.Process(target=_child, args=arguments, daemon=True)
    child.start()
    sender.close()
    try:
        return _answer(receiver, RUNGS[removed])
    finally:
        child.kill()  # also after an answer: as printed, the loop leaves work behind that nobody waits for
        child.join()
        child.close()
        receiver.close()


def _answer(receiver: Connection, name: str) -> float:
    if not receiver.poll(ANSWER_WITHIN_S):
        fix = "take a smaller batch_size or loop_steps, or leave the loop out with repeats=0"
        raise RuntimeError(f"the benchmark loop ({name}) gave no answer within {ANSWER_WITHIN_S:g} s: {fix}")
    try:
        answer = receiver.recv()
    except EOFError:
        answer = "its process died without a word"
    if isinstance(answer, str):
        raise RuntimeError(f"the benchmark loop ({name}) failed: {answer}")
    return answer


def _child(sender: Connection, model: str, batch_size: int, steps: int, removed: int, device: torch.device) -> None:
    """Print, so to speak, one answer: the loop's seconds per step, or the first line of what went wrong."""
    _prctl_pr_set_pdeathsig(SIGKILL)  # Linux: should the rank die, so does this process
    if not multiprocessing.parent_process().is_alive():
        os._exit(1)
    try:
        workload = models.make(model)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        with contextlib.closing(open_stream(device)) as stream:
            sender.send(benchmark(workload, batch_size, steps, repairs_of(removed), stream))
    except BaseException as e:
        sender.send(f"{type(e).__name__}: {e}".splitlines()[0])
