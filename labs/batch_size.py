"""Which batch size trains fastest, what does it cost in latency, and when do two ranks win?

    python -m labs.batch_size      |      torchrun --nproc-per-node 2 -m labs.batch_size --model cnn --batches 4 32 256

About 8 s on 2 CPU cores. A step's time has a fixed part (launching kernels, reading and updating every parameter, the
all-reduce between ranks) and a part per sample. All batch sizes and modes take turns:

  single    one rank trains, the others wait
  ddp       all ranks train one model with DistributedDataParallel
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.memory.activation_bytes import activation_bytes
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

MOST_STEPS = 16  # steps per turn


@dataclass(frozen=True)
class Config:
    """What to train, and with which batch sizes."""

    model: str = "mlp"
    """One of labs.common.models.MODELS, package.module:factory, or in a notebook a function that returns a module."""
    batches: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    """Samples per rank and step."""
    seconds: Annotated[float, Gt(0)] = 9.0
    """Total time for all rounds, in s. A slower machine runs fewer rounds (at least 9), so its intervals are wider."""
    turn_s: Annotated[float, Gt(0)] = 0.008
    """Minimum duration of a turn in s: fast steps repeat up to 16 times, and their mean is the sample."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run two rounds, with no batch above 256."""

    def __post_init__(self) -> None:
        require(len(self.batches) > 0 and min(self.batches) >= 1, "batches must hold positive numbers")
        require(
            len(set(self.batches)) == len(self.batches), "batches must not repeat: each one is a point on the curve"
        )
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be built."""
    models.build(config.model)


def training_step(workload: models.Workload, model: nn.Module, batch: list[Tensor]) -> Callable[[], None]:
    """Return a function that runs one training step of `model` on `batch`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = batch

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model(x), y).backward()
        optimizer.step()

    return step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield activation bytes by batch, then interleaved seconds per step of all batches and modes (slowest rank)."""
    workload = models.build(config.model, config.seed)
    model = workload.module.to(rank.device)
    ddp = DistributedDataParallel(model) if rank.world_size > 1 else None
    steps = {}
    for batch in [b for b in config.batches if b <= 256] or config.batches[:1] if config.smoke else config.batches:
        data = [t.to(rank.device) for t in workload.make_batch(batch)]
        kept = activation_bytes(workload, *data)
        yield rank.record("activation_bytes", "B", kept, kind="modelled", batch=batch)
        steps["single", batch] = training_step(workload, model, data) if rank.rank == 0 else lambda: None
        if ddp is not None:
            steps["ddp", batch] = training_step(workload, ddp, data)
    repeats = {case: _repeats(step, config.turn_s, rank) for case, step in steps.items()}
    turns = {case: _repeated(step, repeats[case]) for case, step in steps.items()}
    seconds = measure.interleave(
        turns,
        2 if config.smoke else measure.Budget(config.seconds, rank.slowest, least=9),
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    for case, samples in seconds.items():
        mode, batch = case
        yield rank.record("step_s", "s", rank.slowest([s / repeats[case] for s in samples]), mode=mode, batch=batch)


def _repeats(step: Callable[[], object], turn_s: float, rank: Rank) -> int:
    """Return how many steps fill a turn, after a warm-up. The slowest rank decides, because all must take as many."""
    rank.barrier()
    seconds = measure.time_steps(step, 3, rank.device)[-1]
    return max(1, min(MOST_STEPS, int(turn_s / max(rank.slowest([seconds])))))


def _repeated(step: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [step() for _ in range(times)]


def rates(records: Records, mode: str = "single") -> dict[int, list[float]]:
    """Return the whole job's samples per second in each round, by samples per rank."""
    found = {}
    for r in records.where("step_s", mode=mode):
        ranks = 1 if mode == "single" else r.layout["world_size"]
        found[r.case["batch"]] = [ranks * r.case["batch"] / s for s in r.samples]
    return dict(sorted(found.items()))


def knee(records: Records) -> int:
    """Return the smallest batch that reaches half of one rank's best median throughput."""
    median = {batch: measure.estimate(samples).value for batch, samples in rates(records).items()}
    return next(batch for batch, rate in median.items() if rate >= max(median.values()) / 2)


def speedups(records: Records) -> dict[int, measure.Estimate]:
    """Return throughput of all ranks over one rank's, paired by round, by samples per rank; empty without DDP."""
    single = rates(records)
    return {b: measure.paired_ratio(samples, single[b]) for b, samples in rates(records, "ddp").items()}


def category(records: Records) -> str:
    """Say whether the knee lies strictly between the smallest and the largest batch, and who wins at each of them."""
    found, batches = speedups(records), sorted(rates(records))
    inside = batches[0] < knee(records) < batches[-1]
    ends = ["wins" if found[b].low > 1 else "loses" if found[b].high < 1 else "inconclusive" for b in
            (batches[0], batches[-1]) if found]  # fmt: skip
    return f"knee inside: {inside}; DDP at the ends: {ends}"


def answer(run: Records) -> Iterator[str]:
    """Yield where throughput saturates, and the batch above which several ranks win."""
    median = {batch: measure.estimate(samples, "samples/s") for batch, samples in rates(run).items()}
    best = max(median, key=lambda batch: median[batch].value)
    yield f"Batch {best} has the highest throughput, {median[best]}; batch {knee(run)} is the first with half of it."
    found = speedups(run)
    if won := [batch for batch, ratio in found.items() if ratio.low > 1]:
        yield f"{run[0].layout['world_size']} ranks train faster than one from a batch of {won[0]} per rank."
    elif found:
        yield "DDP doesn't win at any of these batch sizes."


if __name__ == "__main__":
    cli.main()
