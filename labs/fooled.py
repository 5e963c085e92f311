"""What speedup does a careless benchmark report, and what would an honest one?

    python -m labs.fooled --nproc 2
    python -m labs.fooled --ways debug_baseline two_units --seconds 5

About 12 s on 2 CPU cores. There are six ways to fool yourself, and three need two ranks. Each round takes a way twice:
as somebody in a hurry would (`reported`), and carefully (`honest`). Both answers are speedups.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.data import moby_dick
from labs.common.data.fashion import vectors
from labs.common.data_parallel.training import train_step
from labs.common.models.text_models import Block
from labs.kit import cli, measure, supervise
from labs.kit.errors import did_you_mean, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Answers = tuple[float, float]
"""(reported, honest) speedup of one round."""
Once = Callable[[int], Answers]
"""Follows a way once, in the order that its seed draws."""
LEAST_ROUNDS = 9
BATCH = 256  # of weak_as_strong


@dataclass(frozen=True)
class Config:
    """Which ways, and for how long."""

    ways: tuple[str, ...] = ()
    """Names from WAYS, such as debug_baseline. Default: all six."""
    seconds: Annotated[float, Gt(0)] = 9.0
    """Time for all ways, in s. A slower machine repeats each way less often, but at least 9 times."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of models, data and orders."""
    smoke: bool = False
    """Follow each way twice: too few for an interval."""

    def __post_init__(self) -> None:
        for name in self.ways:
            require(
                name in WAYS, f"ways: there is no {name!r}: {did_you_mean(name, WAYS)}take some of {', '.join(WAYS)}"
            )


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield (reported, honest) speedups of each way. Rank 0 takes the ways for one rank while the others wait."""
    chosen = [name for name in WAYS if name in (config.ways or WAYS)]
    for done, name in enumerate(chosen):
        rank.progress(done, len(chosen), name)
        together = name in WITH_TWO_RANKS
        if rank.world_size > 1 if together else rank.rank == 0:
            once = WAYS[name](config, rank)
            slowest = rank.slowest if together else list  # ranks that measure together must stop together
            rounds = 2 if config.smoke else measure.Budget(config.seconds / len(chosen), slowest, least=LEAST_ROUNDS)
            pairs = [once(seed) for seed in measure.within(itertools.count(config.seed), rounds)]
            for benchmark, answers in zip(("reported", "honest"), zip(*pairs, strict=True), strict=True):
                yield rank.record("speedup", "x", answers, way=name, benchmark=benchmark)
        rank.barrier()
    rank.progress(len(chosen), len(chosen), "done")


def debug_baseline(config: Config, rank: Rank) -> Once:
    """Report the speedup of a training step over itself with anomaly detection on. The truth is 1."""
    step = training(64, config, rank)

    def debugged() -> None:
        with torch.autograd.set_detect_anomaly(True):  # left on after a search for a NaN
            step()

    def once(seed: int) -> Answers:
        s = medians({"ours": step, "debugged": debugged, "usual": step}, 6, rank, seed)
        return s["debugged"] / s["ours"], s["usual"] / s["ours"]

    return once


def two_units(config: Config, rank: Rank) -> Once:
    """Report the speedup from sorting sentences by length in tokens/s, padding included; honestly, in words/s."""
    rows = sentences()
    step = next_word_training(rank.device, config.seed)
    batches = {"unsorted": batched(rows, rank.device), "sorted": batched(sorted(rows, key=len), rank.device)}
    for batch in itertools.chain(*batches.values()):  # warm up: kernels are chosen for each length
        step(batch)
    passes = {order: lambda order=order: [step(batch) for batch in batches[order]] for order in batches}

    def once(seed: int) -> Answers:
        s = medians(passes, 2, rank, seed)
        tokens = {order: sum(batch.numel() for batch in batches[order]) for order in batches}
        words_gain = s["unsorted"] / s["sorted"]  # both orders hold the same words
        return words_gain * tokens["sorted"] / tokens["unsorted"], words_gain

    return once


def samples_rate(config: Config, rank: Rank) -> Once:
    """Report the speedup of a large batch in samples/s; honestly, in time until the same loss."""
    data = vectors(10_000, rank.device)
    train_to_loss(64, 0.1, config.seed, data, 2.2)  # warm-up

    def once(seed: int) -> Answers:
        (samples, seconds), (samples_large, seconds_large) = (
            train_to_loss(batch, rate, seed, data) for batch, rate in LEARNING_RATES.items()
        )
        return (samples_large / seconds_large) / (samples / seconds), seconds / seconds_large

    return once


def weak_as_strong(config: Config, rank: Rank) -> Once:
    """Report the speedup of all ranks with a whole batch each; honestly, with one batch shared between them."""
    steps = {
        "alone": training(BATCH, config, rank) if rank.rank == 0 else lambda: None,
        "batch each": training(BATCH, config, rank, ddp=True),
        "batch shared": training(max(1, BATCH // rank.world_size), config, rank, ddp=True),
    }

    def once(seed: int) -> Answers:
        s = medians(steps, 3, rank, seed, together=True)
        return rank.world_size * s["alone"] / s["batch each"], s["alone"] / s["batch shared"]

    return once


def one_clock(config: Config, rank: Rank) -> Once:
    """Report the speedup of shared work by rank 0's clock; honestly, by the slowest. The last one has twice as much."""
    parts = [2 if r == rank.world_size - 1 else 1 for r in range(rank.world_size)]
    step = training(64, config, rank)

    def seconds_of(steps: int) -> list[float]:
        """Return the seconds of `steps` steps on each rank, which all start together."""
        rank.barrier()
        return rank.gather(measure.time_steps(lambda: [step() for _ in range(steps)], 1, rank.device)[0])

    def once(seed: int) -> Answers:
        whole = seconds_of(4 * sum(parts) if rank.rank == 0 else 0)[0]
        shared = seconds_of(4 * parts[rank.rank])
        return whole / shared[0], whole / max(shared)

    return once


def other_size(config: Config, rank: Rank) -> Once:
    """Report how much faster an all-reduce is with half the bytes, for 40 kB; honestly, for the 40 MB to exchange."""
    gradients = torch.zeros(10_010_000, device=rank.device)
    small, large = (
        {n: lambda n=n: dist.all_reduce(gradients[:n]) for n in (numbers, numbers // 2)}
        for numbers in (10_010, 10_010_000)
    )

    def once(seed: int) -> Answers:
        s = medians(small, 15, rank, seed, together=True) | medians(large, 3, rank, seed, together=True)
        return s[10_010] / s[5_005], s[10_010_000] / s[5_005_000]

    return once


WAYS: Mapping[str, Callable[[Config, Rank], Once]] = {
    way.__name__: way for way in (debug_baseline, weak_as_strong, two_units, samples_rate, one_clock, other_size)
}
WITH_TWO_RANKS = ("weak_as_strong", "one_clock", "other_size")


def medians(
    steps: Mapping[object, Callable[[], object]], rounds: int, rank: Rank, seed: int, *, together: bool = False
) -> dict[object, float]:
    """Return the median seconds of each step, interleaved. With `together`, all ranks take part; the slowest counts."""
    between = rank.barrier if together else lambda: None
    seconds = measure.interleave(steps, rounds, rank.device, between=between, seed=seed)
    return {name: statistics.median(rank.slowest(s) if together else s) for name, s in seconds.items()}


def training(batch: int, config: Config, rank: Rank, *, ddp: bool = False) -> Callable[[], None]:
    """Return a warm training step of an MLP on one batch. With `ddp`, all ranks must call it together."""
    workload = models.make("mlp", config.seed)
    model = workload.module.to(rank.device)
    x, y = (t.to(rank.device) for t in workload.make_batch(batch))
    model = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def step() -> None:
        train_step(model, optimizer, x, y, workload.loss)

    for _ in range(12):
        step()
    return step


# -- sentences of a book, padded to the longest of a batch

PADDING, WORDS = 0, 256  # the book's words are hashed to the numbers 1 to 255


def sentences(count: int = 128) -> list[Tensor]:
    """Return the first sentences of Moby-Dick, each as numbers of its words."""
    book = moby_dick()
    parts = re.split(r"(?<=[.!?;])\s+", book[book.index("Call me Ishmael") :][: 400 * count])[:count]
    return [torch.tensor([1 + sum(map(ord, word)) % (WORDS - 1) for word in part.split()]) for part in parts]


def batched(rows: list[Tensor], device: torch.device, size: int = 16) -> list[Tensor]:
    """Return batches of `size` rows, each padded to its longest: (rows, longest) int64."""
    groups = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [nn.utils.rnn.pad_sequence(g, batch_first=True, padding_value=PADDING).to(device) for g in groups]


def next_word_training(device: torch.device, seed: int, width: int = 64) -> Callable[[Tensor], None]:
    """Return a training step of a transformer block that predicts each next word, padding excepted."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(WORDS, width), Block(width, 4), nn.Linear(width, WORDS)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)

    return lambda batch: train_step(model, optimizer, batch[:, :-1], batch[:, 1:], loss)


# -- training to a loss

LEARNING_RATES = {32: 0.2, 1024: 0.4}
"""{batch: SGD's learning rate} that reached the loss with the fewest samples, of 0.05, 0.1, 0.2, 0.4, 0.8 and 1.6."""
TARGET = 0.8  # nats
MOST_SAMPLES = 500_000  # a training run that hasn't reached the loss by then ends


def train_to_loss(
    batch: int, rate: float, seed: int, data: tuple[Tensor, ...], target: float = TARGET
) -> tuple[int, float]:
    """Return samples and seconds until a small MLP's loss on 1,000 other images is `target`; testing isn't timed."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model.to(images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    samples, seconds, steps = 0, 0.0, max(1, 512 // batch)
    while samples < MOST_SAMPLES:
        measure.sync(images.device)
        start = time.perf_counter()
        for _ in range(steps):
            rows = torch.randint(len(images), (batch,), device=images.device)
            train_step(model, optimizer, images[rows], labels[rows], cross_entropy)
        measure.sync(images.device)
        seconds += time.perf_counter() - start
        samples += steps * batch
        with torch.no_grad():
            if cross_entropy(model(test_images[:1000]), test_labels[:1000]) <= target:
                break
    return samples, seconds


BUSY = "import os, sys\nprint(flush=True)\nwhile os.getppid() == int(sys.argv[1]): pass"


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """Run a process that computes on this process's cores until the block ends, or this process."""
    command = [sys.executable, "-I", "-S", "-c", BUSY, str(os.getpid())]
    with supervise.started(command, stdout=subprocess.PIPE) as process:
        process.stdout.read(1)  # it is running
        yield


def answer(records: Records) -> Iterator[str]:
    """Return what each way reports, and the honest speedup."""
    for name in dict.fromkeys(r.case["way"] for r in records):
        reported, honest = (records.one("speedup", way=name, benchmark=b) for b in ("reported", "honest"))
        yield (
            f"{name}: reported {measure.estimate(reported.samples, 'x')}, "
            f"honest {measure.estimate(honest.samples, 'x')}."
        )


def category(records: Records) -> str:
    """Return the ways that fool in this run: the ratio of reported to honest speedup excludes 1."""
    fooling = []
    for name in dict.fromkeys(r.case["way"] for r in records):
        reported, honest = (records.one("speedup", way=name, benchmark=b).samples for b in ("reported", "honest"))
        if measure.differs(measure.paired_ratio(reported, honest)):
            fooling.append(name)
    return ", ".join(fooling)


if __name__ == "__main__":
    cli.main()
