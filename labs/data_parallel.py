"""How much faster do n devices train than one, and what does each way of splitting the batch move?

    python -m labs.data_parallel                                # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.data_parallel --model my_package.module:factory

About 6 s on 2 CPU cores.

All ways take turns within one run, round by round, so that a slow spell of the machine hits all of them:
  single   one rank trains, the others wait
  copies   n ranks train n models, without any communication: the machine's own ceiling
  ddp      n ranks train one model with DistributedDataParallel, for every n from 2 up (1 if there is only one)
  dp       one process trains on n devices as nn.DataParallel does (on CPUs: its algorithm with threads)
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from labs.common import models
from labs.common.data_parallel import scaling
from labs.common.data_parallel.gradient_buckets import counting_all_reduce
from labs.common.data_parallel.replicas import ThreadedDataParallel, nbytes
from labs.common.data_parallel.training import train_step
from labs.common.data_parallel.wire import sent_by
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Step = Callable[[], object]


@dataclass(frozen=True)
class Config:
    """What to train and how long to measure."""

    model: str = "cnn"
    """One of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 64
    """Samples per rank (weak scaling) or in total (strong scaling)."""
    split: Literal["weak", "strong"] = "weak"
    """weak: every rank gets a whole batch; strong: the ranks share one batch."""
    modes: tuple[Literal["single", "copies", "ddp", "dp"], ...] = ("single", "copies", "ddp", "dp")
    """Ways to train, taken in turn."""
    seconds: float = 4.3
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that every way takes its turn; by default as many as fit into `seconds`, at least 6."""
    inner: int = 2
    """Steps per turn."""
    bucket_cap_mb: float = 25.0
    """Size of DDP's gradient buckets in MiB; the default of torch is 25."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """Only a few steps, to see that it runs."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        measure.require_budget(self.seconds, self.rounds)
        require(self.inner >= 1, f"inner must be at least 1, not {self.inner}")
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        require("single" in self.modes, "modes must hold 'single': every speed-up is relative to it")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if this many ranks cannot share the batch."""
    require(
        config.split == "weak" or config.batch_size % world_size == 0,
        f"batch_size {config.batch_size} cannot be split over {world_size} ranks: take a multiple of {world_size}",
    )
    models.build(config.model)


def predict(config: Config, ranks: int) -> dict[str, float]:
    """Bytes each way moves per step, by closed form, by name.

    `ddp handed over`: what a rank hands to DDP's all-reduces; `ddp sent`: what a ring then makes it send.
    `dp ...`: the phases of DataParallel. All but `dp scatter` pass device 0; the batch may come from the host.
    """
    workload = models.build(config.model)
    x, _ = workload.make_batch(_rows(config, ranks) * ranks)
    parameters = models.gradient_bytes(workload.module)
    buffers = nbytes(*workload.module.buffers())
    two = x[:2]  # the output of two rows tells that of all, in a fraction of the time
    outputs = nbytes(workload.module(two)) * len(x) // len(two)
    dp = scaling.data_parallel_bytes(parameters, buffers, nbytes(x), outputs, ranks)
    ring = scaling.ring_all_reduce_bytes(parameters, ranks)
    return {"ddp handed over": parameters, "ddp sent": ring, **{f"dp {k}": v for k, v in dp.items()}}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Step times of all ways, in turn; bytes counted."""
    counted: Counter[str] = Counter()
    steps = {case: step for case, step in _steps(config, rank, counted)}
    for step in steps.values():
        rank.barrier()
        # A fixed number: ranks that decide for themselves would stop at different steps and hang.
        measure.time_steps(step, 2 if config.smoke else 8, rank.device)
    steps["all_reduce", rank.world_size] = _all_reduce(config, rank)
    counted.clear()
    rounds, inner = (2, 1) if config.smoke else (measure.rounds_of(config, rank.slowest), config.inner)
    seconds = measure.interleave(
        steps,
        rounds,
        rank.device,
        inner=inner,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    calls = inner * len(seconds["all_reduce", rank.world_size])
    yield rank.record("all_reduce_s", "s", rank.slowest(seconds.pop(("all_reduce", rank.world_size))))
    for (mode, ranks), samples in seconds.items():
        rows = _rows(config, ranks)
        yield rank.record("step_s", "s", rank.slowest(samples), mode=mode, ranks=ranks, batch_per_rank=rows)
    if all_reduces := counted.pop("all_reduces", 0):
        yield rank.record("all_reduces_per_step", "1", all_reduces / calls)
        counted["ddp handed over"] = counted.pop("bytes")
    for way, total in counted.items():
        yield rank.record("bytes_per_step", "B", total / calls, way=way)
    if ("ddp", rank.world_size) in steps:
        yield from sent_on_the_wire(steps["ddp", rank.world_size], 2 if config.smoke else 5, rank)


def sent_on_the_wire(step: Step, n: int, rank: Rank) -> Iterator[Record]:
    """Bytes that each rank sends in a DDP step, by the kernel's count of its sockets; nothing where there is none."""
    sent = sent_by(step, rank, calls=n)
    if sent is not None and rank.world_size > 1 and "nccl" not in rank.backend:
        yield rank.record("wire_bytes_per_step", "B", [b / n for b in sent])


def _rows(config: Config, ranks: int) -> int:
    """Samples per rank when `ranks` ranks train."""
    return config.batch_size if config.split == "weak" else config.batch_size // ranks


def _steps(config: Config, rank: Rank, counted: Counter) -> Iterator[tuple[tuple[str, int], Step]]:
    """A training step for each (mode, ranks); ranks that have no part in it get one that does nothing."""
    everyone = rank.world_size
    for mode in config.modes:
        if mode == "single":
            yield (mode, 1), train_single(config, rank, _rows(config, 1)) if rank.rank == 0 else _idle
        elif mode == "copies":
            yield (mode, everyone), train_single(config, rank, _rows(config, everyone))
        elif mode == "ddp":
            for ranks in range(min(2, everyone), everyone + 1):
                yield (mode, ranks), train_ddp(config, rank, _rows(config, ranks), ranks, counted)
        elif rank.local_world_size == everyone:  # one process cannot reach the devices of another machine
            places = rank.gather(rank.cores[0] if rank.cores else rank.device.index)
            rows = _rows(config, everyone) * everyone
            yield (mode, everyone), train_dp(config, rank, rows, places, counted) if rank.rank == 0 else _idle


def train_single(config: Config, rank: Rank, rows: int) -> Step:
    """A step on this rank alone, with a batch of `rows`."""
    workload, module, x, y = _ready(config, rank, rows)
    return partial(train_step, module, _sgd(module), x, y, workload.loss)


def train_ddp(config: Config, rank: Rank, rows: int, ranks: int, counted: Counter) -> Step:
    """A step of the first `ranks` ranks together, each with a batch of `rows` of its own."""
    group = dist.new_group(list(range(ranks)))  # every rank must call this, also those outside of the group
    if rank.rank >= ranks:
        return _idle
    workload, module, x, y = _ready(config, rank, rows)
    # A broadcast: all ranks get rank 0's parameters. From here on, every backward is an all-reduce.
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=config.bucket_cap_mb)
    if ranks == rank.world_size:
        ddp.register_comm_hook(counted, counting_all_reduce)
    return partial(train_step, ddp, _sgd(ddp), x, y, workload.loss)


def train_dp(config: Config, rank: Rank, rows: int, places: list[int], counted: Counter) -> Step:
    """A step of one process on the devices `places`. The whole batch of `rows` goes in; the module shares it out."""
    workload, module, x, y = _ready(config, rank, rows)
    if rank.device.type == "cuda":
        dp = nn.DataParallel(module, device_ids=places)
        return partial(train_step, dp, _sgd(module), x, y, workload.loss)
    threaded = ThreadedDataParallel(module, places, counted)
    return partial(threaded.train_step, _sgd(module), x, y, workload.loss)


def _ready(config: Config, rank: Rank, rows: int) -> tuple[models.Workload, nn.Module, Tensor, Tensor]:
    """Workload, module and one batch, on the device. Made once: making data is not what is timed here."""
    workload = models.build(config.model, config.seed)
    x, y = workload.make_batch(rows)
    return workload, workload.module.to(rank.device), x.to(rank.device), y.to(rank.device)


def _sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


def _idle() -> None:
    """Another rank's turn; the next barrier is the wait."""


def _all_reduce(config: Config, rank: Rank) -> Step:
    """One all-reduce of as many bytes as the model has gradients, with nothing to hide behind."""
    size = models.gradient_bytes(models.build(config.model).module)
    buffer = torch.zeros(size // 4, device=rank.device)
    return partial(dist.all_reduce, buffer)


def modelled_speedup(records: Records) -> float:
    """Samples per second of DDP on all ranks relative to one, if nothing overlapped and no rank slowed another.

    n b t1 / (b t1 + all-reduce), b the share of the batch a rank has: from one rank's step time, taken as
    proportional to the batch, and the time of one all-reduce alone.
    """
    single = records.one("step_s", mode="single")
    ranks = single.layout["world_size"]
    ddp = records.one("step_s", mode="ddp", ranks=ranks).case["batch_per_rank"]
    share = ddp / single.case["batch_per_rank"]
    return ranks * share * single.value / (share * single.value + records.one("all_reduce_s").value)


def speedups(records: Records) -> dict[tuple[str, int], measure.Estimate]:
    """Samples per second relative to one rank, paired round by round: `{(mode, ranks): Estimate}`."""
    single = records.one("step_s", mode="single")
    return {
        (r.case["mode"], r.case["ranks"]): measure.paired_ratio(
            [t / single.case["batch_per_rank"] for t in single.samples],
            [t / (r.case["ranks"] * r.case["batch_per_rank"]) for t in r.samples],
        )
        for r in records.where("step_s")
    }


def answer(run: Records) -> Iterator[str]:
    """The speed-up against n, against the machine's own ceiling, and what is missing, in sentences."""
    found = speedups(run)
    n = run[0].layout["world_size"]
    if n == 1:
        yield f"One rank takes {run.one('step_s', mode='single').value * 1e3:.1f} ms a step. A speed-up needs two."
        return
    names = {"ddp": "DDP", "dp": "DataParallel"}
    for mode, name in names.items():
        if (mode, n) in found:
            yield f"On {n} devices {name} trains {found[mode, n]} as many samples/s as one device."
    if ("copies", n) in found:
        ceiling = found["copies", n]
        slower = (
            f"not {n}: copies that exchange nothing slow each other down"
            if ceiling.high < n
            else ("and copies that exchange nothing are not shown to slow each other down")
        )
        yield f"The machine's ceiling is {ceiling}, {slower}."
        if ("ddp", n) in found:
            copies, ddp = run.one("step_s", mode="copies", ranks=n), run.one("step_s", mode="ddp", ranks=n)
            kept = measure.paired_ratio(copies.samples, ddp.samples).scaled(100, "%")
            lost = "no cost that this run can show" if kept.high >= 100 else "what is missing is the price of DDP"
            yield f"DDP reaches {kept} of the ceiling: {lost}."
    if ("dp", n) in found and ("ddp", n) in found:
        ddp, dp = (run.one("step_s", mode=mode, ranks=n) for mode in ("ddp", "dp"))
        yield measure.verdict(measure.paired_ratio(dp.samples, ddp.samples), "DDP's speed over DataParallel's") + "."


if __name__ == "__main__":
    cli.main()
