"""How much of the gradient exchange does DDP hide behind backward?

    python -m labs.comm_overlap      |      torchrun --nproc-per-node 2 -m labs.comm_overlap --bucket-cap-mb 5
    python -m labs.comm_overlap --width 512 --bucket-mb 1 4      # more sizes of buckets

About 15 s on 2 CPU cores. Three or more kinds of step take turns, without a hook:

  no exchange       DDP under no_sync
  one bucket        all gradients in one bucket, which fills only when backward ends, so nothing overlaps
  default buckets   DDP with PyTorch's buckets (or --bucket-cap-mb): each bucket is sent as soon as it is full

In the same rounds, every kind that exchanges also runs with a hook that notes when each bucket fills and when its
average arrives. On CPU cores, the connection is slowed until sending the gradients takes as long as a step without
exchange.

DDP refuses hooks whose annotations are strings, so this module has no `from __future__ import annotations`.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.common.communication import wire
from labs.common.models import gradient_bytes
from labs.common.timing.moments import now, seconds_between
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

ONE_BUCKET_MB = 10_000
NONE, ONE, MANY = "no exchange", "one bucket", "default buckets"


@dataclass(frozen=True)
class Config:
    """The model, the connection, and how often to measure."""

    width: Annotated[int, Ge(1)] = 1024
    """Width of each layer of the MLP."""
    layers: Annotated[int, Ge(1)] = 16
    """Layers of the MLP; each has 4 * width * (width + 1) bytes of gradients."""
    batch_size: Annotated[int, Ge(1)] = 128
    """Samples per rank and step."""
    mb_s: Annotated[float | None, Gt(0)] = None
    """Bandwidth between CPU ranks in each direction, in 10^6 byte/s. None: sending takes as long as a step."""
    bucket_cap_mb: Annotated[float | None, Gt(0)] = None
    """Size of the "default buckets" in MiB. None: PyTorch's default, 1 MiB for the first and 25 MiB for the others."""
    bucket_mb: tuple[float, ...] = ()
    """More bucket sizes to compare, in MiB; each takes turns as "4 MiB buckets"."""
    rounds: Annotated[int, Ge(2)] = 9
    """Number of rounds; each kind of step takes one turn per round."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run only a few steps."""

    def __post_init__(self) -> None:
        good = all(0 < mb < float("inf") for mb in self.bucket_mb) and len(set(self.bucket_mb)) == len(self.bucket_mb)
        require(good, f"bucket_mb must contain distinct positive sizes, not {self.bucket_mb}")


def perceptron(config: Config) -> nn.Module:
    """Build `layers` equal layers: their gradients become ready one after the other, the last layer's first."""
    layers = [m for _ in range(config.layers) for m in (nn.Linear(config.width, config.width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@dataclass
class Timeline:
    """Times within one step on one rank: host clock seconds, or CUDA events."""

    start: object = None
    forward_end: object = None
    backward_end: object = None
    full: dict[int, object] = field(default_factory=dict)
    """When bucket i was full."""
    averaged: dict[int, object] = field(default_factory=dict)
    """When bucket i held the mean over ranks. Buckets may finish in any order."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes in bucket i."""


def noting_all_reduce(current: list[Timeline], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket as DDP does, and note when the all-reduce starts and ends (a communication hook)."""
    line, i, gradients = current[0], bucket.index(), bucket.buffer()
    line.full[i], line.sizes[i] = now(gradients.device), gradients.nbytes

    def note_end(future: torch.futures.Future) -> Tensor:
        line.averaged[i] = now(gradients.device)
        return future.value()[0]

    return dist.all_reduce(gradients.div_(dist.get_world_size()), async_op=True).get_future().then(note_end)


class Trainer:
    """A DDP model and its training step. With `hooked`, `lines` collects one Timeline per step."""

    def __init__(self, config: Config, rank: Rank, bucket_cap_mb: float | None, hooked: bool) -> None:
        torch.manual_seed(config.seed)
        self.model = DistributedDataParallel(perceptron(config).to(rank.device), bucket_cap_mb=bucket_cap_mb)
        self.x = torch.randn(config.batch_size, config.width, device=rank.device)
        self.lines: list[Timeline] = []
        self.current = [Timeline()]
        if hooked:
            self.model.register_comm_hook(self.current, noting_all_reduce)

    def step(self, exchange: bool = True) -> None:
        """Run forward and backward."""
        with nullcontext() if exchange else self.model.no_sync():
            self.model.zero_grad()
            self.model(self.x).square().mean().backward()

    def noted_step(self) -> None:
        """Run the same step and record its timeline."""
        line = self.current[0] = Timeline(start=now(self.x.device))
        self.model.zero_grad()
        loss = self.model(self.x).square().mean()
        line.forward_end = now(self.x.device)
        loss.backward()
        line.backward_end = now(self.x.device)
        self.lines.append(line)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield interleaved step times of every kind, and a typical step's timeline for each kind that exchanges."""
    caps = {ONE: ONE_BUCKET_MB, MANY: config.bucket_cap_mb} | {f"{mb:g} MiB buckets": mb for mb in config.bucket_mb}
    plain = {way: Trainer(config, rank, cap, hooked=False) for way, cap in caps.items()}
    noted = {way: Trainer(config, rank, cap, hooked=True) for way, cap in caps.items()}
    kinds: dict[tuple[str, bool], Callable[[], None]] = {(NONE, False): lambda: plain[MANY].step(exchange=False)}
    kinds |= {(way, False): trainer.step for way, trainer in plain.items()}
    kinds |= {(way, True): trainer.noted_step for way, trainer in noted.items()}
    for step in kinds.values():
        measure.time_steps(step, 2, rank.device)  # DDP rebuilds its buckets after the first backward
    size = gradient_bytes(plain[MANY].model.module)
    mb_s = config.mb_s or matching_bandwidth(kinds[NONE, False], size, rank)
    for trainer in noted.values():
        trainer.lines.clear()
    paced = rank.device.type == "cpu" and rank.world_size > 1
    with wire.slowed(rank, mb_s) if paced else nullcontext():
        seconds = measure.interleave(
            kinds,
            2 if config.smoke else config.rounds,
            rank.device,
            between=rank.barrier,
            on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
        )
    if paced:
        yield rank.record("connection_mb_s", "MB/s", mb_s)
    yield rank.record("gradient_bytes", "B", size)
    step_s = {kind: rank.slowest(samples) for kind, samples in seconds.items()}
    for (way, hooked), samples in step_s.items():
        yield rank.record("noted_step_s" if hooked else "step_s", "s", samples, way=way)
    for way, trainer in noted.items():
        yield rank.record("backward_s", "s", rank.slowest([backward_s(line) for line in trainer.lines]), way=way)
        usual_s = statistics.median(step_s[way, False])
        nearest = min(range(len(trainer.lines)), key=lambda i: abs(step_s[way, True][i] - usual_s))
        yield from spans(way, trainer.lines[nearest], rank)


def matching_bandwidth(step: Callable[[], None], size: int, rank: Rank) -> float:
    """Return the bandwidth in 10^6 byte/s at which a ring all-reduce of `size` bytes takes as long as `step`.

    Each rank sends 2 (n-1)/n of the bytes.
    """
    n = rank.world_size
    step_s = statistics.median(rank.slowest(measure.time_steps(step, 3, rank.device)))
    return max(1.0, 2 * (n - 1) / n * size / step_s / 1e6)


def backward_s(line: Timeline) -> float:
    """Return seconds from the end of forward to the last gradient."""
    return max(seconds_between(line.forward_end, full) for full in line.full.values())


def spans(way: str, line: Timeline, rank: Rank) -> Iterator[Record]:
    """Yield when each part of one step began and ended on each rank, in s since the first rank started it.

    Backward ends with its last gradient; the time after that is waiting. A bucket waits until every rank has filled it.
    GPUs share no clock: there, each rank's step starts at 0, and waiting counts as exchange.
    """
    late_s, shared = 0.0, rank.device.type == "cpu"
    if shared:
        late_s = line.start - min(rank.gather(line.start))
    at = {i: late_s + seconds_between(line.start, moment) for i, moment in line.full.items()}
    done = {i: late_s + seconds_between(line.start, moment) for i, moment in line.averaged.items()}
    forward_end = late_s + seconds_between(line.start, line.forward_end)
    all_full = {i: max(times) if shared else at[i] for i in at for times in [[r[i] for r in rank.gather(at)]]}
    parts = [("forward", 0, late_s, forward_end), ("backward", 0, forward_end, max(at.values()))]
    for i in sorted(at):
        start = min(all_full[i], done[i])
        parts += [("wait", line.sizes[i], at[i], start), ("exchange", line.sizes[i], start, done[i])]
    for number, (part, size, begin, end) in enumerate(parts):
        case = {"way": way, "part": part, "number": number, "bytes": size}
        yield rank.record("span_s", "s", [begin, end], rank=rank.rank, **case)


def overlap_gain(records: Records, slow: str = ONE, fast: str = MANY) -> measure.Estimate:
    """Return how many times faster a step is with `fast` than with `slow`."""
    return measure.paired_ratio(*(records.one("step_s", way=way).samples for way in (slow, fast)))


def category(records: Records) -> str:
    """Say whether default buckets make a step "faster" or "slower" than one bucket, or "inconclusive".

    With `bucket_mb`, compare the first of those sizes with the default buckets instead.
    """
    if not (given := records[0].config["bucket_mb"]):
        return measure.direction(overlap_gain(records))
    return measure.direction(overlap_gain(records, MANY, f"{given[0]:g} MiB buckets"))


def answer(records: Records) -> Iterator[str]:
    """Yield the three step times and the gain."""
    none, one, many = (1e3 * records.one("step_s", way=way).value for way in (NONE, ONE, MANY))
    yield f"A step takes {none:.0f} ms without exchange, {one:.0f} ms with one bucket, {many:.0f} ms with more buckets."
    yield f"Sending buckets during backward makes a step {overlap_gain(records)} as fast."
    for r in records.where("step_s"):
        if r.case["way"] not in (NONE, ONE, MANY):
            yield f"With {r.case['way']} it takes {1e3 * r.value:.0f} ms."


if __name__ == "__main__":
    cli.main()
