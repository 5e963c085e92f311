"""How wrong is an article's benchmark loop, fault by fault, and how long does a training step really take?

    python -m labs.timing                                                  # the course's CNN
    python -m labs.timing --model my_package.module:factory --nproc 1      # your own model
    python -m labs.timing --model labs.timing:article --batch-size 32 --loop-steps 100

About 8 s on 2 CPU cores. First runs the article's loop, fixing one fault at a time, each time in a new process that has
computed nothing before. On a GPU, also shows what a clock sees if it doesn't wait for the GPU. Then times the step
itself: every warm-up step, and samples until the time is up. With several ranks this is a DDP step, and the slowest
rank counts.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.timing import probing, roofline
from labs.common.timing.moments import now, seconds_between
from labs.kit import _compat, cli, measure, supervise
from labs.kit.hardware import require_shareable
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

WARM_UP_STEPS = 3
ANSWER_WITHIN_S = 100.0
Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]
"""A training step on a batch already on the device; returns the loss."""


@dataclass(frozen=True)
class Config:
    """What to time, and how often."""

    model: str = "cnn"
    """One of labs.common.models.MODELS, or package.module:factory."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Samples per rank."""
    seconds: Annotated[float, Gt(0)] = 2.0
    """Time for sampling a step, in s; takes at least 6 samples."""
    repeats: Annotated[int, Ge(0)] | None = None
    """Runs of the loop with each of its faults; 0 skips it. Default: 9, but 0 for your own model."""
    loop_steps: Annotated[int, Ge(2)] = 10
    """Steps of the loop. The article runs 100, so a cold start weighs less."""
    tf32: bool = False
    """Let matrix products use TF32: only GPUs of compute capability 8.0 or higher."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run each loop once, take few samples of a step, and use at most 64 samples per batch."""

    def __post_init__(self) -> None:
        models.require_known(self.model)

    @property
    def rows(self) -> int:
        """Samples per rank, fewer in a smoke run."""
        return min(self.batch_size, 64) if self.smoke else self.batch_size

    @property
    def loop_repeats(self) -> int:
        """Runs of each loop; for your own model, which may start slowly, only on request."""
        usual = 0 if ":" in self.model else 9
        wanted = usual if self.repeats is None else self.repeats
        return min(wanted, 1) if self.smoke else wanted


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be built and trained."""
    models.build(config.model)


def article() -> models.Workload:
    """Build the article's model, Linear(1000, 10). The article uses 32 rows."""

    def make_batch(batch_size: int) -> Batch:
        return torch.randn(batch_size, 1000), torch.randint(10, (batch_size,))

    return models.Workload(nn.Linear(1000, 10), make_batch, nn.functional.cross_entropy)


# -- the loop: each function fixes one more fault


def as_printed(step: Step, make_batch: Callable[[], Batch], steps: int, device: torch.device) -> float:
    """Return seconds per step by the article's loop."""
    start = time.perf_counter()
    for _ in range(steps):
        x, y = (t.to(device) for t in make_batch())
        step(x, y)
    return (time.perf_counter() - start) / steps


def data_outside(step: Step, make_batch: Callable[[], Batch], steps: int, device: torch.device) -> float:
    """Make and copy the batch before starting the clock. Now nothing in the loop waits for a GPU."""
    x, y = (t.to(device) for t in make_batch())
    start = time.perf_counter()
    for _ in range(steps):
        step(x, y)
    return (time.perf_counter() - start) / steps


def synchronised(step: Step, make_batch: Callable[[], Batch], steps: int, device: torch.device) -> float:
    """Wait for the device before both clock readings."""
    x, y = (t.to(device) for t in make_batch())
    measure.sync(device)
    start = time.perf_counter()
    for _ in range(steps):
        step(x, y)
    measure.sync(device)
    return (time.perf_counter() - start) / steps


def warmed_up(step: Step, make_batch: Callable[[], Batch], steps: int, device: torch.device) -> float:
    """Run the first steps, which allocate, load kernels and pick algorithms, before starting the clock."""
    x, y = (t.to(device) for t in make_batch())
    for _ in range(WARM_UP_STEPS):
        step(x, y)
    return synchronised(step, lambda: (x, y), steps, device)


def median_of_steps(step: Step, make_batch: Callable[[], Batch], steps: int, device: torch.device) -> float:
    """Record the time on the device after every step (CUDA events) and take the median step."""
    x, y = (t.to(device) for t in make_batch())
    for _ in range(WARM_UP_STEPS):
        step(x, y)
    moments = [now(device)]
    for _ in range(steps):
        step(x, y)
        moments.append(now(device))
    measure.sync(device)
    return statistics.median(seconds_between(a, b) for a, b in pairwise(moments))


LOOPS = {
    "as printed": as_printed,
    "data outside": data_outside,
    "synchronise": synchronised,
    "warm up": warmed_up,
    "median of steps": median_of_steps,
}
RUNGS = tuple(LOOPS)


def training(config: Config, device: torch.device, wrap: Callable = lambda module: module) -> tuple[Step, Any]:
    """Return a plain SGD training step, and a function that makes a batch on the host."""
    workload = models.make(config.model, config.seed)
    model = wrap(workload.module.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = workload.loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, lambda: workload.make_batch(config.rows)


# -- what is measured


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the loops' results, what an unsynchronised clock sees, step times, FLOPs and the datasheet peak."""
    if config.loop_repeats:  # first, because its processes must start as cold as this one still is
        for rung, seconds in answers(config, rank).items():
            yield rank.record("answer_s", "s", seconds, rung=rung)
    set_tf32(config.tf32)
    yield from step_times(config, rank)
    if config.loop_repeats and rank.device.type != "cpu" and rank.rank == 0:
        yield from seen_shares(config, rank)
    rank.barrier()


def set_tf32(on: bool) -> None:
    """Allow or forbid TF32 in FP32 matrix products and convolutions. PyTorch allows it for convolutions by default."""
    torch.backends.cudnn.allow_tf32 = on
    torch.set_float32_matmul_precision("high" if on else "highest")


def answers(config: Config, rank: Rank) -> dict[str, list[float]]:
    """Run every loop repeatedly; return `{rung: [s per step, one per repeat]}`, the same on all ranks.

    The ranks share the repeats. Each repeat runs all loops in shuffled order, so samples with the same index are pairs.
    BadInput for a GPU in exclusive-process mode.
    """
    _compat.preload_dynamo()
    if rank.device.type == "cuda":  # this process holds the GPU, and each child starts CUDA there too
        require_shareable({rank.device.index})
    found: dict[tuple[int, str], float] = {}
    for repeat in range(rank.rank, config.loop_repeats, rank.world_size):
        for rung in random.Random(repeat).sample(RUNGS, len(RUNGS)):
            found[repeat, rung] = one_answer(config, rung, rank.device)
        rank.progress(repeat + 1, config.loop_repeats, "the loop, fault by fault")
    shared = {key: s for part in rank.gather(found) for key, s in part.items()}
    return {rung: [shared[i, rung] for i in range(config.loop_repeats)] for rung in RUNGS}


def one_answer(config: Config, rung: str, device: torch.device) -> float:
    """Return what one run of the loop reports from a new process. RuntimeError if it fails or takes too long."""
    # A process that has used CUDA can't fork. The fork server hasn't used it, and imports only once.
    method = "fork" if device.type == "cpu" else "forkserver"
    context: Any = multiprocessing.get_context(method)
    if device.type != "cpu":
        context.set_forkserver_preload([__name__, _compat.DYNAMO])
    receiver, sender = context.Pipe(duplex=False)
    # Kill the child after its answer: the loop as printed leaves queued work that nobody waits for.
    with receiver, supervise.forked(_child, sender, config, rung, device, method=method):
        sender.close()
        if not receiver.poll(ANSWER_WITHIN_S):
            fix = "use a smaller batch_size or loop_steps, or leave the loop out with repeats=0"
            raise RuntimeError(f"the loop ({rung}) gave no answer within {ANSWER_WITHIN_S:g} s: {fix}")
        try:
            answer = receiver.recv()
        except EOFError:
            answer = "its process died without a message"
    if isinstance(answer, str):
        raise RuntimeError(f"the loop ({rung}) failed: {answer}")
    return answer


def _child(sender: Connection, config: Config, rung: str, device: torch.device) -> None:
    """Send the loop's seconds per step, or the first line of an error."""
    try:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        set_tf32(config.tf32)  # a new process has PyTorch's defaults
        step, make_batch = training(config, device)
        steps = 3 if config.smoke else config.loop_steps
        sender.send(LOOPS[rung](step, make_batch, steps, device))
    except BaseException as e:
        sender.send(f"{type(e).__name__}: {e}".splitlines()[0])


WAITS = ("data on the device", "x.to(device, non_blocking=True)", "x.to(device)", "loss.item()")
"""What a loop does in every step. According to the documentation, the last two wait for all queued work."""


def seen_shares(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the share of each loop's time that a clock sees if it doesn't wait at the end. Loops are interleaved."""
    steps, rounds = (3, 2) if config.smoke else (config.loop_steps, 6)
    step, make_batch = training(config, rank.device)
    batch = [t.pin_memory() for t in make_batch()]  # from pageable memory, even non_blocking may wait
    on_device = [t.to(rank.device) for t in batch]

    def share(way: str) -> float:
        measure.sync(rank.device)
        start = time.perf_counter()
        for _ in range(steps):
            copied = [t.to(rank.device, non_blocking="non_blocking" in way) for t in batch] if ".to(" in way else None
            loss = step(*(copied or on_device))
            if way == "loss.item()":
                loss.item()
        early = time.perf_counter() - start
        measure.sync(rank.device)
        return early / (time.perf_counter() - start)

    share(WAITS[0])
    rows = [{way: share(way) for way in random.Random(i).sample(WAITS, len(WAITS))} for i in range(rounds)]
    for way in WAITS:
        case = {"way": way, "waits": way in WAITS[2:], "steps": steps, "batch": config.rows}
        yield rank.record("seen_share", "1", [row[way] for row in rows], rank=0, **case)


def step_times(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield each warm-up step, samples of a step, its FLOPs, and the datasheet peak if known."""
    step, make_batch = training(
        config, rank.device, DistributedDataParallel if rank.world_size > 1 else lambda module: module
    )
    batch = [t.to(rank.device) for t in make_batch()]
    warm = measure.warm_up(lambda: step(*batch), rank.device, max_steps=12 if config.smoke else 60, agree=rank.agree)
    yield rank.record("warm_up_s", "s", rank.slowest(warm.seconds))
    yield rank.record("warm_up_steps", "steps", warm.steps, settled=warm.settled)
    # All ranks must run equally many steps, so the slowest decides. Several short steps make one sample.
    each_s = statistics.median(rank.slowest(warm.seconds[-5:]))
    inner = max(1, min(100, math.ceil(0.004 / each_s)))
    rounds = 6 if config.smoke else measure.Budget(config.seconds, rank.slowest)
    timed = measure.interleave({"train": lambda: step(*batch)}, rounds, rank.device, inner=inner, between=rank.barrier)
    case = {"mode": "train", "batch_per_rank": config.rows, "steps_per_sample": inner}
    yield rank.record("step_s", "s", rank.slowest(timed["train"]), **case)
    if rank.rank == 0:
        yield rank.record("step_flop", "FLOP", step_flop(config, rank.device), kind="modelled")
        if peak := probing.datasheet_peak("tf32" if config.tf32 else "fp32", rank.device):
            yield rank.record("datasheet_flop_s", "FLOP/s", peak.flop_s, kind="published", source=peak.source)
    rank.barrier()


def step_flop(config: Config, device: torch.device) -> float:
    """Return the FLOPs of forward and backward for one rank's batch: its matrix products and convolutions.

    Counts on the meta device. If the model can't go there, runs one real pass of a new copy on `device`.
    """
    with contextlib.suppress(Exception):
        return roofline.training_step_work(models.make(config.model), config.rows).flop
    return roofline.count(probing.training_step(models.make(config.model), config.rows, device)).flop


# -- analysis


def over_repaired(records: Records) -> dict[str, measure.Estimate]:
    """Return {rung: its result over the fully fixed loop's}, paired by repeat. LookupError without the loop."""
    right = records.one("answer_s", rung=RUNGS[-1]).samples
    return {rung: measure.paired_ratio(records.one("answer_s", rung=rung).samples, right) for rung in RUNGS}


def largest_fault(records: Records) -> str:
    """Name the fix that changes the loop's result the most. The median isn't one of them: it removes noise."""
    found = list(over_repaired(records).items())[:-1]
    changes = {name: abs(math.log(after.value / before.value)) for (_, before), (name, after) in pairwise(found)}
    return max(changes, key=changes.__getitem__)


def category(records: Records) -> str:
    """Name the fix that matters most, and say whether the loop as printed is right within 20 %."""
    wrong = not 1 / 1.2 < over_repaired(records)["as printed"].value < 1.2
    return f"the loop as printed is {'wrong' if wrong else 'right'}; most by: {largest_fault(records)}"


def answer(run: Records) -> Iterator[str]:
    """Yield how wrong the loop is, and the step's time, throughput and MFU."""
    if run.where("answer_s"):
        found = ", ".join(f"{rung}: {ratio}" for rung, ratio in over_repaired(run).items())
        yield f"The loop's result over the fully fixed one, fixing one more fault each time: {found}."
    for r in run.where("seen_share"):
        yield f"Without a wait at the end, {r.case['way']}: the clock sees {100 * r.value:.0f} % of the time."
    train, ranks = run.one("step_s", mode="train"), run[0].layout["world_size"]
    warm = measure.WarmUp(run.one("warm_up_s").samples, run.one("warm_up_steps").case["settled"])
    rate = measure.estimate([ranks * train.case["batch_per_rank"] / s for s in train.samples], "samples/s")
    what = f"A DDP step on {ranks} ranks" if ranks > 1 else "A training step"
    yield f"{what} takes {measure.estimate(train.samples, 's')}, {rate}; the warm-up was {warm}."
    flop_s = run.one("step_flop").value / train.value
    peaks = run.where("datasheet_flop_s")
    mfu = f", {100 * flop_s / peaks[0].value:.2g} % of the datasheet's peak (MFU)" if peaks else ""
    yield f"Each rank computes {flop_s:.2g} FLOP/s{mfu}."


if __name__ == "__main__":
    cli.main()
