"""How much of DDP's all-reduces does backward hide?

    python -m labs.ddp_overlap                                  # launches its own ranks
    python -m labs.ddp_overlap --bucket-cap-mb 25               # one bucket: nothing is left to hide it behind
    python -m labs.ddp_overlap --mb-s 100                       # on a wire that carries 100 MB/s in each direction
    torchrun --nproc-per-node 2 -m labs.ddp_overlap --model my_package.module:factory

About 5 s on 2 CPU cores. A communication hook notes when each bucket of gradients is ready and when its all-reduce
is done. Steps with all-reduces and steps under `no_sync` take turns, so two independent answers can be compared:
  from the timeline    how long backward goes on after the last gradient of the last rank (exposed), and how much
                       longer the gradients themselves take while all-reduces are under way (slowed)
  from the clock       step(DDP) - step(no_sync), round by round

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from labs.common.communication import delay, wire
from labs.common.data_parallel.training import PERCEPTRON, build, require_model
from labs.common.profiling.intervals import length
from labs.common.tensors import nbytes
from labs.common.timing.moments import now, seconds_between
from labs.kit import cli, measure
from labs.kit.errors import naming, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """What to train, and in how many buckets its gradients travel."""

    model: str = PERCEPTRON
    """"perceptron": `layers` equal layers. Otherwise one of labs.models.MODELS, or package.module:factory."""
    width: int = 512
    """Width of the perceptron's layers."""
    layers: int = 6
    """Layers of the perceptron."""
    batch_size: int = 256
    """Samples per rank."""
    bucket_cap_mb: float = 1.0
    """Size of DDP's gradient buckets in MiB; torch's default of 25 would make one bucket of a model this small."""
    mb_s: float | None = None
    """Bandwidth of the wire in each direction, in 10^6 byte/s; by default the wire is left as it is."""
    seconds: float = 2.5
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the two kinds of step take turns; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Only a few steps, to see that it runs."""

    def __post_init__(self) -> None:
        require_model(self)
        measure.require_budget(self.seconds, self.rounds)
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        if self.mb_s is not None:
            with naming("mb_s"):
                wire.require_rate(1e6 * self.mb_s)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built, or a wire is asked for that there is not."""
    if config.mb_s is not None:
        wire.require_wire(world_size, ", or leave out mb_s")
    build(config)


@dataclass
class Timeline:
    """Moments of one step on one rank: seconds on the host's clock, or CUDA events on a GPU."""

    start: object = None
    forward_done: object = None
    ready: list = field(default_factory=list)
    """Of each bucket, in the order in which DDP sends them: its last gradient is there, its all-reduce starts."""
    done: list = field(default_factory=list)
    """Of each bucket: its all-reduce is done."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each bucket."""
    backward_done: object = None
    end: object = None


def timed_all_reduce(of: dict[str, Timeline], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's default hook, an average over all ranks, with a note of when it starts and when it is done."""
    line, tensor = of["step"], bucket.buffer()
    line.ready.append(now(tensor.device))
    line.sizes.append(nbytes(tensor))
    line.done.append(None)
    number = len(line.done) - 1  # a later bucket may be done first
    work = dist.all_reduce(tensor.div_(dist.get_world_size()), async_op=True)  # starts; backward goes on

    def done(future: torch.futures.Future) -> Tensor:
        line.done[number] = now(tensor.device)  # on a GPU: in a stream that waits for the all-reduce
        return future.value()[0]

    return work.get_future().then(done)


def timed_and_delayed(of: dict[str, Timeline], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The same where a slow wire has to be acted out: the all-reduce is done when that wire would have carried it."""
    line, tensor = of["step"], bucket.buffer()
    line.ready.append(now(tensor.device))
    line.sizes.append(nbytes(tensor))
    line.done.append(None)
    number = len(line.done) - 1

    def done(future: torch.futures.Future) -> Tensor:
        line.done[number] = now(tensor.device)
        return future.value()

    return delay.holding()(None, bucket).then(done)


def timed_step(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    loss: Callable,
    synchronise: bool,
    of: dict[str, Timeline],
) -> None:
    """One training step with its moments noted in `of["step"]`; without all-reduces unless `synchronise`."""
    line = of["step"] = Timeline(start=now(x.device))
    optimizer.zero_grad()
    with nullcontext() if synchronise else ddp.no_sync():
        value = loss(ddp(x), y)
        line.forward_done = now(x.device)
        value.backward()  # returns when the gradients are there and, with all-reduces, averaged
    line.backward_done = now(x.device)
    optimizer.step()
    line.end = now(x.device)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Steps with and without all-reduces in turn; then what the timelines of all steps say."""
    workload = build(config)
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
    ddp = DistributedDataParallel(workload.module.to(rank.device), bucket_cap_mb=config.bucket_cap_mb)
    of: dict[str, Timeline] = {}
    ddp.register_comm_hook(of, timed_all_reduce if wire.can_pace() else timed_and_delayed)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)  # 0: under no_sync the ranks would drift apart
    lines: dict[str, list[Timeline]] = {"ddp": [], "no_sync": []}

    def step_of(mode: str) -> Callable[[], None]:
        def step() -> None:
            timed_step(ddp, optimizer, x, y, workload.loss, mode == "ddp", of)
            lines[mode].append(of["step"])

        return step

    steps = {mode: step_of(mode) for mode in lines}
    for step in steps.values():
        measure.time_steps(step, 2 if config.smoke else 5, rank.device)  # DDP's first step goes in one bucket
    for found in lines.values():
        found.clear()
    if config.mb_s:
        yield from wire.how(rank)
    with wire.slowed(rank, config.mb_s) if config.mb_s else nullcontext():
        seconds = measure.interleave(
            steps,
            measure.rounds_of(config, rank.slowest),
            rank.device,
            between=rank.barrier,
            on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
        )
    for mode, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), mode=mode)
    yield from _parts(lines, rank)
    yield from _one_timeline(lines["ddp"], seconds["ddp"], rank)


def _parts(lines: dict[str, list[Timeline]], rank: Rank) -> Iterator[Record]:
    """Per step: gradients alone, all-reduces under way, and what of them nothing hides."""
    own = [(seconds_between(t.forward_done, t.backward_done), 0.0, 0.0) for t in lines["no_sync"]]
    yield rank.record("gradients_s", "s", rank.slowest([gradients for gradients, *_ in own]), mode="no_sync")
    own = [
        (seconds_between(t.forward_done, t.ready[-1]), seconds_between(t.ready[-1], t.backward_done), _under_way(t))
        for t in lines["ddp"]
    ]
    yield rank.record("gradients_s", "s", rank.slowest([gradients for gradients, *_ in own]), mode="ddp")
    # The rank that is last to have its gradients waits for nobody: what is left to it is communication.
    exposed = [min(ranks) for ranks in zip(*rank.gather([exposed for _, exposed, _ in own]), strict=True)]
    yield rank.record("exposed_s", "s", exposed)
    under_way = [min(ranks) for ranks in zip(*rank.gather([u for *_, u in own]), strict=True)]
    yield rank.record("under_way_s", "s", under_way)


def _under_way(line: Timeline) -> float:
    """Seconds of a step in which at least one all-reduce of this rank was under way."""
    spans = zip(line.ready, line.done, strict=True)
    return length((seconds_between(line.start, a), seconds_between(line.start, b)) for a, b in spans)


def _one_timeline(lines: list[Timeline], seconds: list[float], rank: Rank) -> Iterator[Record]:
    """The step of median length, from every rank, on one clock if the ranks share a host's."""
    [middle] = rank.gather(sorted(range(len(seconds)), key=seconds.__getitem__)[len(seconds) // 2])[:1]
    line, late_s = lines[middle], 0.0
    if rank.device.type == "cpu" and rank.local_world_size == rank.world_size:
        late_s = line.start - min(rank.gather(line.start))
    ends = {
        "forward": (line.start, line.forward_done),
        "backward": (line.forward_done, line.backward_done),
        "optimizer": (line.backward_done, line.end),
    }
    for part, moments in ends.items():
        yield rank.record(
            "timeline_s", "s", [late_s + seconds_between(line.start, t) for t in moments], rank=rank.rank, part=part
        )
    for i, moments in enumerate(zip(line.ready, line.done, strict=True)):
        span = [late_s + seconds_between(line.start, t) for t in moments]
        case = {"part": "all-reduce", "bucket": i, "bytes": line.sizes[i]}
        yield rank.record("timeline_s", "s", span, rank=rank.rank, **case)


@dataclass(frozen=True)
class Overlap:
    """Where the time of the all-reduces goes, in s per step unless it says otherwise."""

    under_way: measure.Estimate
    """At least one all-reduce is under way."""
    exposed: measure.Estimate
    """Of that, after the last gradient of the last rank: backward waits."""
    hidden: measure.Estimate
    """Share that is not exposed, in %."""
    slowed: measure.Estimate
    """By how much longer the gradients take than without all-reduces."""
    expected: measure.Estimate
    """exposed + slowed: what the timeline says that DDP costs."""
    cost: measure.Estimate
    """step(DDP) - step(no_sync): what the clock says that DDP costs."""
    cost_share: measure.Estimate
    """The same over step(no_sync), in %."""


def overlap(run: Records) -> Overlap:
    """Parts of a step's time, paired round by round."""
    step = {mode: run.one("step_s", mode=mode).samples for mode in ("ddp", "no_sync")}
    gradients = {mode: run.one("gradients_s", mode=mode).samples for mode in ("ddp", "no_sync")}
    exposed, under_way = run.one("exposed_s").samples, run.one("under_way_s").samples
    slowed = [a - b for a, b in zip(gradients["ddp"], gradients["no_sync"], strict=True)]
    cost = [a - b for a, b in zip(step["ddp"], step["no_sync"], strict=True)]
    hidden = [100 * max(0.0, 1 - e / u) if u else 0.0 for e, u in zip(exposed, under_way, strict=True)]
    return Overlap(
        measure.estimate(under_way, "s"),
        measure.estimate(exposed, "s"),
        measure.estimate(hidden, "%"),
        measure.estimate(slowed, "s"),
        measure.estimate([e + s for e, s in zip(exposed, slowed, strict=True)], "s"),
        measure.estimate(cost, "s"),
        measure.estimate([100 * c / t for c, t in zip(cost, step["no_sync"], strict=True)], "%"),
    )


def accounts(found: Overlap) -> str:
    """Whether the timeline's cost is the clock's, in a sentence."""
    both = f"the timeline says {found.expected}, the clock says {found.cost}"
    if found.expected.low <= found.cost.high and found.cost.low <= found.expected.high:
        return f"Exposed and slowed together are what DDP costs, as far as this run can show: {both}."
    return f"Exposed and slowed together are not what DDP costs: {both}. The rest is not told by these records."


def answer(run: Records) -> Iterator[str]:
    """How much is hidden, at what price, and whether two ways to find it agree."""
    if run[0].layout["world_size"] == 1:
        yield "One rank has nobody to exchange gradients with. Overlap needs two."
        return
    found = overlap(run)
    buckets = len({r.case["bucket"] for r in run.where("timeline_s", part="all-reduce")})
    yield (
        f"All-reduces are under way for {found.under_way} of a step, in {buckets} bucket{'s' if buckets > 1 else ''}, "
        f"waiting for other ranks included; {found.exposed} of it is exposed, {found.hidden} is hidden behind backward."
    )
    if measure.differs(found.slowed, 0.0):
        longer = "longer: what is hidden is not free" if found.slowed.value > 0 else "less: this run does not say why"
        yield f"Meanwhile the gradients take {_plain(found.slowed)} {longer}."
    else:
        yield f"That hiding slows the gradients down, this run cannot show ({found.slowed})."
    cost = f"A step takes {found.cost} ({found.cost_share}) longer than under no_sync."
    if not measure.differs(found.cost, 0.0):
        cost = f"That a step takes longer than under no_sync, this run cannot show ({found.cost})."
    yield f"{cost} {accounts(found)}"
    yield from wire.label(run)


def _plain(found: measure.Estimate) -> measure.Estimate:
    """Without its sign."""
    if found.value >= 0:
        return found
    return measure.Estimate(-found.value, -found.high, -found.low, found.n, found.unit)


if __name__ == "__main__":
    cli.main()
