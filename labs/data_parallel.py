"""How many times faster do n ranks train than one?

    python -m labs.data_parallel      |      torchrun --nproc-per-node 2 -m labs.data_parallel --model cnn

About 8 s on 2 CPU cores. Three ways to train take turns, in blocks of equally many steps:

  single   rank 0 trains, the others wait
  copies   every rank trains an independent copy, without communication: the most this machine allows
  ddp      all ranks train one model with DistributedDataParallel's defaults, without a hook

In the same rounds, one all-reduce of as many bytes as the model has gradients is timed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records


@dataclass(frozen=True)
class Config:
    """What to train and how long to measure."""

    model: str = "mlp"
    """One of labs.models.MODELS, package.module:factory, or in a notebook a function that returns a module."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Samples per rank and step."""
    rounds: Annotated[int, Ge(6)] = 12
    """Number of rounds; each way takes one turn per round."""
    block_s: Annotated[float, Gt(0)] = 0.1
    """Approximate duration of one block of steps, in s."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Run only a few steps."""

    def __post_init__(self) -> None:
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be built."""
    models.build(config.model)


def training_step(config: Config, rank: Rank, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Return a training step on this rank's batch. `wrap` is DistributedDataParallel or the identity."""
    workload = models.build(config.model, config.seed)
    model = wrap(workload.module.to(rank.device))
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        loss = workload.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of all ranks here
        optimizer.step()

    return step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield, per block, each way's samples per second summed over the training ranks, and seconds of an all-reduce."""
    plain = training_step(config, rank, wrap=lambda model: model)
    ddp = training_step(config, rank, wrap=DistributedDataParallel)
    gradient_bytes = models.gradient_bytes(models.build(config.model).module)
    gradients = torch.zeros(gradient_bytes // 4, device=rank.device)
    ways = {
        "single": plain if rank.rank == 0 else lambda: None,
        "copies": plain,
        "ddp": ddp,
        "all-reduce": lambda: dist.all_reduce(gradients),
    }
    warm = [measure.time_steps(step, 2 if config.smoke else 15, rank.device) for step in ways.values()]
    slowest_s = max(rank.slowest([min(seconds) for seconds in warm]))
    steps = 1 if config.smoke else max(2, round(config.block_s / slowest_s))
    block = measure.interleave(
        ways,
        6 if config.smoke else config.rounds,
        rank.device,
        inner=steps,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    yield rank.record("all_reduce_s", "s", rank.slowest(block.pop("all-reduce")))
    for way, seconds in block.items():
        by_rank = rank.gather(seconds)  # seconds per step: [rank][block]
        training = by_rank[:1] if way == "single" else by_rank
        yield rank.record("samples_per_s", "1/s", measure.total_rate(training, config.batch_size), way=way)
    yield rank.record("gradient_bytes", "B", gradient_bytes)
    yield rank.record("steps_per_block", "1", steps)


def speedup(records: Records, way: str = "ddp", over: str = "single") -> measure.Estimate:
    """Return samples per second of one way over another, paired by round."""
    rates = (records.one("samples_per_s", way=name).samples for name in (way, over))
    return measure.paired_ratio(*rates)


def category(records: Records) -> str:
    """Say whether DDP trains "faster" or "slower" than one rank, or "inconclusive"."""
    return measure.direction(speedup(records))


def answer(records: Records) -> Iterator[str]:
    """Yield the speedup, the machine's limit, and the time of an all-reduce."""
    n = records[0].layout["world_size"]
    if n == 1:
        yield "A speedup needs at least two ranks."
        return
    ceiling, share = speedup(records, "copies"), speedup(records, "ddp", "copies")
    yield f"DDP on {n} ranks trains {speedup(records)} as many samples per second as one rank."
    yield f"{n} copies that never communicate train {ceiling}; DDP reaches {100 * share.value:.0f}% of that."
    mb, ms = records.one("gradient_bytes").value / 1e6, 1e3 * records.one("all_reduce_s").value
    yield f"One all-reduce of its {mb:.2f} MB of gradients takes {ms:.2f} ms when nothing else runs."


if __name__ == "__main__":
    cli.main()
