"""How long does one training step take, and which number can be trusted?

    python -m labs.timing                                                  # the course's CNN, and an article's loop
    python -m labs.timing --model my_package.module:factory --nproc 1      # a report on your own model
    torchrun --nproc-per-node 2 -m labs.timing --batch-size 256

About 10 s on 2 CPU cores. First the article's benchmark loop, fault by fault, each time in a new process
(labs.common.timing.benchmark_loop), and what a clock sees that does not wait for the device. A CPU has no queue of
work: there both run on an emulated one, and their records are of the kind "modelled". Then the step itself: warmed up
until steady, every sample kept; with several ranks it is a step of DDP, with and without the synchronisation of
gradients in turn, the slowest rank counting. Then the FLOPs of a step, and the best rate that any kernel
reaches on the same device.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.timing import benchmark_loop, probing, roofline
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate, estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Step = Callable[[], None]
OWN_LOOP_REPEATS = 6
EARLY_ROUNDS = 6


@dataclass(frozen=True)
class Config:
    """What to time, and how often."""

    model: str = "cnn"
    """One of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 64
    """Samples per rank."""
    seconds: float = 3.4
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Samples of the step's time; by default as many as fit into `seconds`, at least 6."""
    least_s: float = 0.004
    """Least duration of a sample: faster steps are timed several at a time. On a GPU more hides launches better."""
    repeats: int | None = None
    """Runs of the article's loop with each of its faults; 0 leaves it out. Default: 6, and 0 for your own model."""
    loop_steps: int = 10
    """Steps of that loop. The article makes 100: a cold start then weighs less."""
    tf32: bool = False
    """Let matrix products round to TF32, in the step and in the peak alike: GPUs from compute capability 8.0 only."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Few rounds, one run of each loop, small matrices."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        measure.require_budget(self.seconds, self.rounds, 5)
        require(0 < self.least_s < math.inf, f"least_s must be positive, not {self.least_s}")
        require((self.repeats or 0) >= 0, f"repeats must be at least 0, not {self.repeats}")
        require(self.loop_steps >= 2, f"loop_steps must be at least 2, not {self.loop_steps}")
        models.require_known(self.model)

    @property
    def loop_repeats(self) -> int:
        """Runs of each benchmark: your own model may be slow to start, so then only if asked for."""
        usual = 0 if ":" in self.model else OWN_LOOP_REPEATS
        wanted = usual if self.repeats is None else self.repeats
        return min(wanted, 1) if self.smoke else wanted


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built and trained."""
    models.build(config.model)


def predict(first_s: float, steady_s: float, data_s: float, steps: int) -> dict[str, float]:
    """Seconds per step that each of the article's benchmarks should print, from three times in s that it mixes up.

    They are a process's first step, a steady one, and the making of a batch, which includes its copy. The copy waits
    for the device, so that host and device take turns and only the last step escapes the clock. With the data outside
    it sees nothing but launches, here counted as 0. Interruptions are left out.
    """
    cold = steady_s + (first_s - steady_s) / steps
    printed = data_s + cold - steady_s / steps
    return dict(zip(benchmark_loop.RUNGS, (printed, 0.0, cold, steady_s, steady_s), strict=True))


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The loop's answers, the step's times, its FLOPs and the peak; last what follows from them."""
    if config.loop_repeats:  # first: its processes start as cold as this one still is
        yield from loop_answers(config, rank)
        yield from early_clocks(config, rank)
    records: list[Record] = []
    for part in (step_times, flop_and_peak):
        for record in part(config, rank):
            records.append(record)
            yield record
    if rank.rank == 0:
        for name, (unit, samples) in derived(Records(records)).items():
            yield rank.record(name, unit, samples)


def loop_answers(config: Config, rank: Rank) -> Iterator[Record]:
    """What runs of the article's benchmark print, fault by fault."""
    steps = 3 if config.smoke else config.loop_steps
    found = benchmark_loop.answers(config.model, config.batch_size, steps, config.loop_repeats, rank)
    for rung, seconds in found.items():
        yield rank.record("answer_s", "s", seconds, kind=_kind_of_queue(rank), rung=rung)


def early_clocks(config: Config, rank: Rank) -> Iterator[Record]:
    """What share of the device's time a clock sees that does not wait at the end, by what the loop itself waits for."""
    if rank.rank == 0:
        steps, rounds = (3, 2) if config.smoke else (config.loop_steps, EARLY_ROUNDS)
        batch = max(1, config.batch_size // 4)  # a quarter, for the learner's time: what waits for what is the same
        for way, shares in benchmark_loop.seen_shares(config.model, batch, steps, rounds, rank.device).items():
            case = {"way": way, "waits": way in benchmark_loop.WAITS[2:], "steps": steps, "batch": batch}
            yield rank.record("seen_share", "1", shares, kind=_kind_of_queue(rank), rank=0, **case)
    rank.barrier()


def _kind_of_queue(rank: Rank) -> Literal["measured", "modelled"]:
    """A CPU's queue is emulated by this course: what a clock reads there is no measurement of a device."""
    return "modelled" if rank.device.type == "cpu" else "measured"


def step_times(config: Config, rank: Rank) -> Iterator[Record]:
    """Warm-up, then training steps; with several ranks also steps under no_sync, in turn."""
    torch.backends.cudnn.allow_tf32 = config.tf32  # convolutions may use it by default
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    steps = trainers(config, rank)
    rank.progress(0, 1, "warm-up")
    warm = measure.warm_up(steps["train"], rank.device, max_steps=12 if config.smoke else 60, agree=rank.agree)
    yield rank.record("warm_up_s", "s", rank.slowest(warm.seconds))
    yield rank.record("warm_up_steps", "steps", warm.steps, settled=warm.settled)
    for step in steps.values():
        measure.time_steps(step, 2, rank.device)
    # All ranks must take equally many steps: the slowest decides.
    inner = steps_per_sample(rank.slowest(warm.seconds[-5:]), config.least_s)
    rounds = 5 if config.smoke else measure.rounds_of(config, rank.slowest)
    seconds = measure.interleave(
        steps,
        rounds,
        rank.device,
        inner=inner,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    for mode, samples in seconds.items():
        case = {"mode": mode, "batch_per_rank": config.batch_size, "steps_per_sample": inner}
        yield rank.record("step_s", "s", rank.slowest(samples), **case)
    yield rank.record("rank_step_s", "s", seconds["train"], rank=rank.rank)


def steps_per_sample(seconds: Sequence[float], least_s: float) -> int:
    """How many steps like those of `seconds` fill `least_s`; at most 100."""
    return max(1, min(100, math.ceil(least_s / statistics.median(seconds))))


def trainers(config: Config, rank: Rank) -> dict[str, Step]:
    """{"train": a training step}, with several ranks under DDP and also {"no_sync"}: without an all-reduce.

    Steps under no_sync let the replicas drift apart, as nothing else does here; their time does not depend on it.
    """
    workload = models.make(config.model, config.seed)
    module = workload.module.to(rank.device)
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    trained = module if rank.world_size == 1 else DistributedDataParallel(module)

    def train() -> None:
        optimizer.zero_grad()
        workload.loss(trained(x), y).backward()
        optimizer.step()

    def no_sync() -> None:
        with trained.no_sync():
            train()

    return {"train": train} if rank.world_size == 1 else {"train": train, "no_sync": no_sync}


def flop_and_peak(config: Config, rank: Rank) -> Iterator[Record]:
    """FLOPs of a step and the device's best rates: rank 0 alone, the others idle, as for notebook 00's peaks."""
    rank.barrier()
    if rank.rank == 0:
        rank.progress(1, 1, "FLOPs and peak")
        work = step_flop(config, rank.device)
        yield rank.record("step_flop", "FLOP", work, kind="modelled", batch_per_rank=config.batch_size)
        kernel, rates = best_rate(config, rank.device)
        yield rank.record("peak_flop_s", "FLOP/s", rates, kernel=kernel)
        if peak := probing.datasheet_peak("tf32" if config.tf32 else "fp32", rank.device):
            yield rank.record("datasheet_flop_s", "FLOP/s", peak.flop_s, kind="published", source=peak.source)
    rank.barrier()


def step_flop(config: Config, device: torch.device) -> float:
    """FLOPs of forward and backward for one rank's batch: its matrix products and convolutions.

    Counted on the meta device. A model that cannot go there makes one real pass on `device`, in a copy of its own.
    """
    with contextlib.suppress(Exception):
        return roofline.training_step_work(models.make(config.model), config.batch_size).flop
    return roofline.count(probing.training_step(models.make(config.model), config.batch_size, device)).flop


def best_rate(config: Config, device: torch.device) -> tuple[str, list[float]]:
    """The fastest of square matrix products, from small to large, and a 3x3 convolution: its name, its FLOP/s now.

    Both are needed: which library is better tuned to a device differs, and a CPU's convolution may be twice as fast.
    """
    dtype, sizes = "tf32" if config.tf32 else "fp32", (256, 512, 1024) if device.type == "cpu" else (2048, 4096, 8192)
    effort = SimpleNamespace(samples=3 if config.smoke else 7, budget_s=0.3)
    found = {}
    for n, seconds in probing.matmul_sweep(dtype, sizes[:1] if config.smoke else sizes, effort, device):
        found[f"matrix product {n}"] = [roofline.matmul_work(n, 4).flop / s for s in seconds]
    step, flop = probing.convolution_step(device)
    torch.backends.cudnn.allow_tf32 = config.tf32
    found["convolution"] = [flop / s for s in probing.timed(step, effort.samples, device)]
    return max(found.items(), key=lambda kernel: statistics.median(kernel[1]))


def derived(records: Records) -> dict[str, tuple[str, list[float]]]:
    """{metric: (unit, samples)} of what follows from the records of a step: sample for sample, so with its spread.

    samples_per_s  of the whole job
    mfu            model FLOP utilisation: FLOPs of the step / (its time x the best rate seen here)
    mfu_datasheet  the same over the datasheet's peak, where that is known
    sync_s, sync_share   what exchanging gradients adds to a step and backward does not hide, paired by rounds;
                         with the wait for the slowest rank. May be negative: then this run can show nothing.
    iqr_share, p95_ratio   the middle half's width and the 95th percentile, over the median: how a step varies
    """
    train = records.one("step_s", mode="train")
    seconds, ranks = train.samples, train.layout["world_size"]
    flop = records.one("step_flop").value
    found = {"samples_per_s": ("samples/s", [ranks * train.case["batch_per_rank"] / s for s in seconds])}
    for name, metric in (("mfu", "peak_flop_s"), ("mfu_datasheet", "datasheet_flop_s")):
        for peak in records.where(metric):
            found[name] = ("1", [flop / (s * peak.value) for s in seconds])
    for alone in records.where("step_s", mode="no_sync"):
        pairs = list(zip(seconds, alone.samples, strict=True))
        found["sync_s"] = ("s", [a - b for a, b in pairs])
        found["sync_share"] = ("1", [1 - b / a for a, b in pairs])
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    found["iqr_share"] = ("1", [(cuts[14] - cuts[4]) / train.value])
    found["p95_ratio"] = ("x", [cuts[18] / train.value])
    return found


def report(records: Records) -> dict[str, Estimate | float | str]:
    """What an engineer asks, from a run's records: the step's median, all that is `derived`, and the warm-up.

    Intervals are those of the steps; that of the peak is not in them. Single numbers have none.
    """
    train = records.one("step_s", mode="train")
    found: dict[str, Estimate | float | str] = {"step_s": estimate(train.samples, "s")}
    for name, (unit, samples) in derived(records).items():
        found[name] = estimate(samples, unit) if len(samples) > 1 else float(f"{samples[0]:.3g}")
    warm = measure.WarmUp(records.one("warm_up_s").samples, records.one("warm_up_steps").case["settled"])
    return {**found, "warm_up": str(warm)}


def drift(samples: Sequence[float]) -> Estimate | None:
    """Each step of the later half over its counterpart in the earlier half; None for fewer than 12 steps."""
    half = len(samples) // 2
    return measure.paired_ratio(samples[-half:], samples[:half]) if half >= 6 else None


def answer(run: Records) -> Iterator[str]:
    """The step's time, whether it was steady, its throughput and MFU, what DDP adds, and what an early clock sees."""
    train, found = run.one("step_s", mode="train"), report(run)
    ranks = train.layout["world_size"]
    what = f"A DDP step on {ranks} ranks" if ranks > 1 else "A training step"
    yield f"{what} takes {found['step_s']}: {found['samples_per_s']}; the warm-up was {found['warm_up']}."
    change = drift(train.samples)
    if change and measure.differs(change) and abs(change.value - 1) > 0.05:
        yield f"It was not steady: the later half of the timed steps took {change} as long as the earlier. Time longer."
    sheet = f", {found['mfu_datasheet'].scaled(100, '%')} of the datasheet's peak" if "mfu_datasheet" in found else ""
    yield f"MFU is {found['mfu'].scaled(100, '%')} of the best rate that any kernel reached here{sheet}."
    if ranks > 1:
        shown = measure.differs(found["sync_s"], 0)
        yield (
            f"Of this, exchanging gradients is {found['sync_share'].scaled(100, '%')}."
            if shown
            else f"What exchanging gradients adds cannot be told: {found['sync_s']}."
        )
    seen = {r.case["way"]: estimate(r.samples).scaled(100, "%") for r in run.where("seen_share")}
    if seen:
        queue = " of the emulated queue" if run.where("seen_share")[0].kind == "modelled" else ""
        free, copying = (seen[way] for way in ("data on the device", "x.to(device)"))
        yield f"A clock read without a wait sees {free}{queue}, {copying} if every step copies its batch."


if __name__ == "__main__":
    cli.main()
