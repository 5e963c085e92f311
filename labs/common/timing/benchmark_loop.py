"""The benchmark loop of an article and its repairs, and what one run of each would print.

`as_printed` is the loop; each function after it repairs one more fault; `repaired` is the last. Every answer is that of
a process of its own that has computed nothing before: a script that is started again pays for its first step again. One
device, no DDP: parallel training is not the subject here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from labs.common import models
from labs.common.timing.streams import DeviceStream, EmulatedStream, open_stream
from labs.kit import _compat, supervise
from labs.kit.hardware import require_shareable
from labs.kit.rank import Rank

WARM_UP_STEPS = 3
ANSWER_WITHIN_S = 100.0
Batch = tuple[Tensor, Tensor]
Train = Callable[[Tensor, Tensor], Tensor]
"""One training step, forward, backward and optimizer, on a batch of the device; returns the loss."""
Stream = DeviceStream | EmulatedStream


def as_printed(train: Train, make_batch: Callable[[], Batch], steps: int, stream: Stream) -> float:
    """Seconds per step by the article's loop."""
    start = time.perf_counter()
    for _ in range(steps):
        x, y = make_batch()  # on the host
        x, y = stream.to_device(x), stream.to_device(y)  # x.to(device): waits until the device has done all before it
        stream.submit(train, x, y)  # returns at once
    return (time.perf_counter() - start) / steps  # the last step may still be running


def data_outside(train: Train, make_batch: Callable[[], Batch], steps: int, stream: Stream) -> float:
    """The batch is made and copied before the clock starts. Now nothing in the loop waits for the device."""
    x, y = map(stream.to_device, make_batch())
    start = time.perf_counter()
    for _ in range(steps):
        stream.submit(train, x, y)
    return (time.perf_counter() - start) / steps  # all steps may still be running


def synchronised(train: Train, make_batch: Callable[[], Batch], steps: int, stream: Stream) -> float:
    """The device is waited for before both readings of the clock."""
    x, y = map(stream.to_device, make_batch())
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        stream.submit(train, x, y)
    stream.synchronize()
    return (time.perf_counter() - start) / steps


def warmed_up(train: Train, make_batch: Callable[[], Batch], steps: int, stream: Stream) -> float:
    """First steps, which allocate, compile and load, come before the clock starts."""
    x, y = map(stream.to_device, make_batch())
    for _ in range(WARM_UP_STEPS):
        stream.submit(train, x, y)
    return synchronised(train, lambda: (x, y), steps, stream)


def repaired(train: Train, make_batch: Callable[[], Batch], steps: int, stream: Stream) -> float:
    """Seconds of a typical step: the device notes the time after every step, and the median of these times counts."""
    x, y = map(stream.to_device, make_batch())  # once, before the clock starts
    for _ in range(WARM_UP_STEPS):
        stream.submit(train, x, y)
    stream.record_event()  # the device notes the time when it gets here: nobody waits for it
    for _ in range(steps):
        stream.submit(train, x, y)
        stream.record_event()
    stream.synchronize()  # before the notes are read
    return statistics.median(stream.laps())


LOOPS = {
    "as printed": as_printed,
    "data outside": data_outside,
    "synchronise": synchronised,
    "warm up": warmed_up,
    "median of steps": repaired,
}
"""Each repairs one more fault and keeps the former repairs."""
RUNGS = tuple(LOOPS)


def training(workload: models.Workload, stream: Stream) -> Train:
    """A training step of `workload` with plain SGD, as the article has it."""
    model = workload.module.to(stream.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


WAITS = ("data on the device", "x.to(device, non_blocking=True)", "x.to(device)", "loss.item()")
"""What a loop may do in every step: the first two wait for nothing, the others for all that is queued."""


def read_early(way: str, train: Train, batch: Batch, steps: int, stream: Stream) -> tuple[float, float]:
    """Seconds of a loop by a clock that does not wait at the end, and by one that does."""
    on_device = tuple(map(stream.to_device, batch))
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        x, y = on_device
        if way.startswith("x.to"):
            x, y = (stream.to_device(t, non_blocking="non_blocking" in way) for t in batch)
        loss = stream.submit(train, x, y)
        if way == "loss.item()":
            stream.item(loss)  # for a progress bar, a log, a check for NaN
    early = time.perf_counter() - start
    stream.synchronize()
    return early, time.perf_counter() - start


def seen_shares(model: str, batch_size: int, steps: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """{way: share of the device's time that a clock without a wait at the end sees, one per round}; all in turn."""
    workload = models.make(model)
    batch = workload.make_batch(batch_size)
    if device.type != "cpu":
        batch = tuple(t.pin_memory() for t in batch)  # from pageable memory, non_blocking may wait all the same
    found: dict[str, list[float]] = {way: [] for way in WAITS}
    with contextlib.closing(open_stream(device)) as stream:
        train = training(workload, stream)
        read_early(WAITS[0], train, batch, WARM_UP_STEPS, stream)
        for turn in range(rounds):
            for way in random.Random(turn).sample(WAITS, len(WAITS)):
                early, late = read_early(way, train, batch, steps, stream)
                found[way].append(early / late)
    return found


def article() -> models.Workload:
    """The article's own model, Linear(1000, 10): 10,010 parameters, 40 kB of gradients. It takes 32 rows."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 1000), torch.randint(10, (batch_size,))

    return models.Workload(nn.Linear(1000, 10), make_batch, nn.functional.cross_entropy)


def answers(model: str, batch_size: int, steps: int, repeats: int, rank: Rank) -> dict[str, list[float]]:
    """What `repeats` runs of each loop print, in s per step: `{rung: [one per repeat]}`, the same on all ranks.

    The ranks share the repeats. Within one, all loops take their turn in a shuffled order, so that samples with
    the same index are pairs. Call it before this process has computed anything: its children start as it is. BadInput
    for a GPU in exclusive-process mode.
    """
    _compat.preload_dynamo()

    if rank.device.type == "cuda":  # this process holds the GPU, and each child starts CUDA there, too
        require_shareable({rank.device.index})
    mine = range(rank.rank, repeats, rank.world_size)
    found: dict[tuple[int, str], float] = {}
    for repeat in mine:
        for rung in random.Random(repeat).sample(RUNGS, len(RUNGS)):
            found[repeat, rung] = one_answer(model, batch_size, steps, rung, rank.device)
        rank.progress(repeat + 1, repeats, "the loop, fault by fault")
    shared = {k: s for part in rank.gather(found) for k, s in part.items()}
    return {rung: [shared[i, rung] for i in range(repeats)] for rung in RUNGS}


def one_answer(model: str, batch_size: int, steps: int, rung: str, device: torch.device) -> float:
    """What one run of the loop prints, in a new process. RuntimeError with one line if it fails or takes too long."""
    # A process that has used CUDA cannot fork; a fork server, which imports once, is a process that has not.
    method = "fork" if device.type == "cpu" else "forkserver"
    context: Any = multiprocessing.get_context(method)
    if device.type != "cpu":
        context.set_forkserver_preload([__name__, _compat.DYNAMO])
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sender, model, batch_size, steps, rung, device)
    # It is killed after its answer as well: as printed, the loop leaves work behind that nobody waits for.
    with receiver, supervise.forked(_child, *arguments, method=method):
        sender.close()
        return _answer(receiver, rung)


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


def _child(sender: Connection, model: str, batch_size: int, steps: int, rung: str, device: torch.device) -> None:
    """Print, so to speak, one answer: the loop's seconds per step, or the first line of what went wrong."""
    try:
        workload = models.make(model)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        with contextlib.closing(open_stream(device)) as stream:
            train = training(workload, stream)
            sender.send(LOOPS[rung](train, lambda: workload.make_batch(batch_size), steps, stream))
    except BaseException as e:
        sender.send(f"{type(e).__name__}: {e}".splitlines()[0])
