"""How long does each pipeline stage wait, and how many micro-batches are best?

    python -m labs.pipeline_parallel      |      torchrun --nproc-per-node 2 -m labs.pipeline_parallel --rounds 20

About 12 s on 2 CPU cores. Splits the model into one stage per rank. These ways to train take turns:

  single        rank 0 trains the whole model, the others wait
  1f1b, gpipe   micro-batches in the order of labs/common/pipelines/schedules.py; one micro-batch is the naive split

On CPU cores, every timed step records its timeline. On GPUs that would make each stage wait for its GPU, so two extra
steps record it. Finally, one more step of each schedule counts what autograd keeps for backward.
"""

from __future__ import annotations

import contextlib
import statistics
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from labs.common import models
from labs.common.pipelines import Chain, chain, even_cuts, split
from labs.common.pipelines.engine import Links, Pipeline, new_links
from labs.common.pipelines.schedules import SCHEDULES, Event, bubble, idle_share, in_flight, with_idle
from labs.kit import cli, measure
from labs.kit._compat import storage_key
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

SMOKE = {"micro_batches": (1, 2), "compare": 2, "batch_size": 8}  # with --smoke on the command line
PARITY_ROWS = 2  # rows per micro-batch when comparing with one process
Step = Callable[[], object]


@dataclass(frozen=True)
class Config:
    """What to train and how long to measure."""

    model: str = "labs.common.sharding.blocks:row_transformer"
    """package.module:factory, or in a notebook a function, that returns an nn.Sequential."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Rows per step."""
    micro_batches: tuple[Annotated[int, Ge(1)], ...] = (1, 4, 16, 32)
    """Numbers of micro-batches to try; 1 is the naive split."""
    compare: Annotated[int, Ge(1)] = 4
    """Number of micro-batches for comparing GPipe with 1F1B and for recording timelines."""
    rounds: Annotated[int, Ge(6)] = 9
    """Number of rounds; each way takes one turn per round."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run only two rounds."""

    def __post_init__(self) -> None:
        models.require_known(self.model)
        require(1 in self.micro_batches, "micro_batches must include 1, the naive split")
        require(self.compare in self.micro_batches, f"compare, {self.compare}, must be one of the micro_batches")
        for m in self.micro_batches:
            require(
                self.batch_size % m == 0,
                f"{m} micro-batches do not divide a batch of {self.batch_size} rows: take a multiple of {m}",
            )

    @property
    def settings(self) -> list[tuple[str, int]]:
        """(schedule, micro-batches) to time."""
        return [("1f1b", m) for m in self.micro_batches] + [("gpipe", self.compare)] * (self.compare > 1)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be split into `world_size` stages with parameters in each."""
    model = chain(config.model)
    for stage, module in enumerate(split(model, even_cuts(model, world_size))):
        require(
            any(True for _ in module.parameters()),
            f"stage {stage} of {world_size} has no parameter to train: use fewer ranks, or a model with more layers",
        )


class Trainer:
    """This rank's stage, its optimizer and the whole batch. `events` collects the timeline of every recorded step."""

    def __init__(self, config: Config, rank: Rank, links: Links) -> None:
        model = chain(config.model, config.seed)
        self.pipeline = Pipeline(model, even_cuts(model, rank.world_size), rank, links=links)
        self.optimizer = torch.optim.SGD(self.pipeline.module.parameters(), lr=1e-3)
        self.x, self.y = (t.to(rank.device) for t in model.make_batch(config.batch_size))
        self.rank, self.events = rank, {}

    def step(self, schedule: str, m: int, noted: bool) -> None:
        """Run one training step with `m` micro-batches."""
        actions = SCHEDULES[schedule](self.rank.rank, self.rank.world_size, m)
        self.pipeline.events = [] if noted else None
        self.optimizer.zero_grad()
        self.pipeline.step(actions, self.x.chunk(m), self.y.chunk(m))
        self.optimizer.step()
        if noted:
            self.events.setdefault((schedule, m), []).append(self.pipeline.events)


def single_step(config: Config, rank: Rank) -> Step:
    """Return a step of the whole model on the whole batch for rank 0, and a no-op for other ranks."""
    if rank.rank > 0:
        return lambda: None
    model = chain(config.model, config.seed)
    module = model.module().to(rank.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    x, y = (t.to(rank.device) for t in model.make_batch(config.batch_size))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(module(x), y).backward()
        optimizer.step()

    return step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield FP64 gradient errors against one process, interleaved step times, each stage's timeline, and bytes kept."""
    links, on_cpu = new_links(), rank.device.type == "cpu"
    for schedule, m in config.settings:
        error = rank.slowest([gradient_error(config, schedule, m, rank, links)])
        yield rank.record("gradient_relative_error", "1", error, schedule=schedule, micro_batches=m)

    trainer = Trainer(config, rank, links)
    steps: dict[tuple[str, int], Step] = {
        (schedule, m): lambda schedule=schedule, m=m: trainer.step(schedule, m, noted=on_cpu)
        for schedule, m in config.settings
    }
    steps["single", 1] = single_step(config, rank)
    for step in steps.values():
        rank.barrier()
        measure.time_steps(step, 2, rank.device)
    trainer.events.clear()
    seconds = measure.interleave(
        steps,
        2 if config.smoke else config.rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    for (schedule, m), samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), schedule=schedule, micro_batches=m)
    for schedule, m in config.settings:
        if not on_cpu:
            measure.time_steps(lambda s=schedule, m=m: trainer.step(s, m, noted=True), 2, rank.device)
        yield from moments(trainer, schedule, m, config, rank)
    for schedule in SCHEDULES:
        for m in config.micro_batches:
            yield from kept(trainer, schedule, m, rank)


def moments(trainer: Trainer, schedule: str, m: int, config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the share of each recorded step in which a stage waits, and the timeline of the median step."""
    steps = zip(*rank.gather(trainer.events[schedule, m]), strict=True)
    steps = [with_idle([e for events in step for e in events], rank.world_size) for step in steps]
    case = {"schedule": schedule, "micro_batches": m}
    yield rank.record("idle_share", "1", [idle_share(events, rank.world_size) for events in steps], **case)
    yield rank.record("idle_formula", "1", bubble(rank.world_size, m), kind="modelled", **case)
    if m in (1, config.compare):
        for e in usual(steps):
            yield rank.record(
                "span_s", "s", [e.start_s, e.end_s], stage=e.stage, part=e.kind, number=e.micro_batch, **case
            )


def usual(steps: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the events of the step with the median duration, in seconds since it began."""
    ends = [max(e.end_s for e in events) - min(e.start_s for e in events) for events in steps]
    events = steps[ends.index(statistics.median_low(ends))]
    start = min(e.start_s for e in events)
    return [Event(e.stage, e.kind, e.micro_batch, e.start_s - start, e.end_s - start) for e in events]


def kept(trainer: Trainer, schedule: str, m: int, rank: Rank) -> Iterator[Record]:
    """Yield the most bytes that each stage keeps for backward at once, and the most micro-batches by the schedule."""
    module = trainer.pipeline.module
    with counting([*module.parameters(), *module.buffers(), trainer.x, trainer.y]) as saved:
        trainer.step(schedule, m, noted=False)
    most = in_flight(SCHEDULES[schedule](rank.rank, rank.world_size, m))
    for stage, (peak, count) in enumerate(rank.gather((saved.peak, most))):
        case = {"schedule": schedule, "micro_batches": m, "stage": stage}
        yield rank.record("kept_bytes", "B", peak, **case)
        yield rank.record("kept_micro_batches", "1", count, kind="modelled", **case)


class SavedBytes:
    """Bytes saved for backward, `now` and at their `peak`. Each storage counts once, in full."""

    def __init__(self, states: Iterable[Tensor]) -> None:
        self.states = {storage_key(t.untyped_storage()) for t in states}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0

    def pack(self, saved: Tensor) -> _Holder | Tensor:
        """Count `saved`, unless it shares storage with a parameter or another state."""
        storage = saved.untyped_storage()
        key = storage_key(storage)
        if key in self.states:
            return saved
        if not self.holders[key]:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self.holders[key] += 1
        holder = _Holder(saved.detach())
        weakref.finalize(holder, self._free, key, storage.nbytes())
        return holder

    def unpack(self, holder: _Holder | Tensor) -> Tensor:
        """Return the saved tensor."""
        return holder.tensor if isinstance(holder, _Holder) else holder

    def _free(self, key: int, nbytes: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.now -= nbytes


class _Holder:
    """Holds a saved tensor, which is freed when the graph drops its last reference to this object."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextlib.contextmanager
def counting(states: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count the bytes saved for backward inside the block, except those of `states`."""
    saved = SavedBytes(states)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        yield saved


def gradient_error(config: Config, schedule: str, m: int, rank: Rank, links: Links) -> float:
    """Return ||g - G|| / ||G|| in FP64: g is the gradient of this rank's stage, G that of one process."""
    model = chain(config.model, config.seed)
    model = Chain(
        model.name, [layer.to(rank.device, torch.float64) for layer in model.layers], _doubled(model), model.loss
    )
    x, y = (t.to(rank.device) for t in model.make_batch(PARITY_ROWS * m))
    whole = model.module()
    model.loss(whole(x), y).backward()
    cuts = even_cuts(model, rank.world_size)
    first, last = ([0, *cuts, len(model.layers)][i] for i in (rank.rank, rank.rank + 1))
    expected = _gradient(whole[first:last])
    whole.zero_grad()
    pipeline = Pipeline(model, cuts, rank, links=links)
    pipeline.step(SCHEDULES[schedule](rank.rank, rank.world_size, m), x.chunk(m), y.chunk(m))
    return float((_gradient(pipeline.module) - expected).norm() / expected.norm())


def _doubled(model: Chain) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the model's batches in FP64 instead of FP32, equal on all ranks."""

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return tuple(t.double() if t.is_floating_point() else t for t in model.make_batch(rows))

    return make_batch


def _gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().clone() for p in module.parameters()])


def category(records: Records) -> str:
    """Name the number of micro-batches with the shortest median 1F1B step."""
    steps = {r.case["micro_batches"]: r.value for r in records.where("step_s", schedule="1f1b")}
    return f"{min(steps, key=steps.__getitem__)} micro-batches"


def answer(records: Records) -> Iterator[str]:
    """Yield the best number of micro-batches, its idle share and formula, bytes kept, and gradient agreement."""
    n = records[0].layout["world_size"]
    steps = {r.case["micro_batches"]: r for r in records.where("step_s", schedule="1f1b")}
    best = min(steps, key=lambda m: steps[m].value)
    times = ", ".join(f"{m}: {1e3 * r.value:.0f} ms" for m, r in steps.items())
    yield f"A step on {n} rank{'s' * (n > 1)} by the number of micro-batches ({times}): {best} is best."
    over_one = measure.paired_ratio(records.one("step_s", schedule="single").samples, steps[best].samples)
    yield f"That is {over_one} as fast as one device."
    measured, modelled = (
        records.one(name, schedule="1f1b", micro_batches=best).value for name in ("idle_share", "idle_formula")
    )
    yield f"A stage then waits for {measured:.0%} of the step; (p-1)/(m+p-1) is {modelled:.0%}."
    most = max(steps)
    gpipe, ours = (records.one("kept_bytes", schedule=s, micro_batches=most, stage=0).value for s in ("gpipe", "1f1b"))
    yield f"With {most} micro-batches, rank 0 keeps {gpipe / 1e6:.1f} MB with GPipe and {ours / 1e6:.1f} MB with 1F1B."
    worst = max(r.value for r in records.where("gradient_relative_error"))
    yield f"In FP64, all gradients match one process within {worst:.0e}."


if __name__ == "__main__":
    cli.main()
