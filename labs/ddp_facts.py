"""Which statements about DDP survive a try?

    python -m labs.ddp_facts
    torchrun --nproc-per-node 2 -m labs.ddp_facts

About 3 s on 2 CPU cores. One small experiment for each statement that the articles make or imply; notebook 03
turns the records into verdicts.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labs.ddp_training import parameter_spread
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record
from labs.parts import models
from labs.parts.data_parallel.replicas import nbytes


@dataclass(frozen=True)
class Config:
    """Sizes of the experiments."""

    batch_size: int = 64
    """Samples per rank and step, as in the articles."""
    steps: int = 150
    """Steps of the article's training loop on random labels."""
    slow_ms: float = 20.0
    """How long the slow rank sleeps in each step."""
    smoke: bool = False
    """Fewer steps."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 2, f"batch_size must be at least 2, not {self.batch_size}")
        require(self.steps >= 20, f"steps must be at least 20, not {self.steps}")
        require(self.slow_ms > 0, f"slow_ms must be positive, not {self.slow_ms}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """All experiments, in turn."""
    experiments = (
        copies,
        input_rows,
        start,
        refused_device_ids,
        random_labels,
        slow_rank,
        bucket_memory,
        relu_floor,
    )
    for done, experiment in enumerate(experiments, start=1):
        torch.manual_seed(rank.rank)  # ranks draw different numbers, as they would without any seed
        yield from experiment(config, rank)
        rank.progress(done, len(experiments), experiment.__name__)


def copies(config: Config, rank: Rank) -> Iterator[Record]:
    """Parameters that each rank holds of the article's model under DDP, and of the model itself."""
    ddp = _article_model(rank)
    held = sum(p.numel() for p in ddp.parameters())
    yield rank.record("parameters", "1", min(rank.gather(held)), where="smallest rank")
    yield rank.record("parameters", "1", sum(p.numel() for p in models.mlp().module.parameters()), where="model")


def input_rows(config: Config, rank: Rank) -> Iterator[Record]:
    """Rows that forward sees on each rank when every rank passes `batch_size` of them to DDP."""
    seen: list[int] = []
    ddp = _article_model(rank)
    ddp.module.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    ddp(torch.randn(config.batch_size, 1024, device=rank.device))
    yield rank.record("rows_in_forward", "1", rank.gather(seen[0]))


def start(config: Config, rank: Rank) -> Iterator[Record]:
    """Do ranks that built different models agree after DDP's constructor, and after five steps?"""
    module = models.mlp().module.to(rank.device)
    yield rank.record("parameter_spread", "1", parameter_spread(module, rank), when="before DDP")
    ddp = DistributedDataParallel(module)
    yield rank.record("parameter_spread", "1", parameter_spread(module, rank), when="after DDP")
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    for _ in range(5):
        local = _article_step(ddp, optimizer, config, rank)
    yield rank.record("parameter_spread", "1", parameter_spread(module, rank), when="after 5 steps")
    yield rank.record("last_loss", "nats", rank.gather(local))


def refused_device_ids(config: Config, rank: Rank) -> Iterator[Record]:
    """`device_ids` with four entries, with one, and None: which does DDP take for this module?"""
    for ids in ([0, 1, 2, 3], [rank.device.index or 0], None):
        try:
            DistributedDataParallel(nn.Linear(2, 2).to(rank.device), device_ids=ids)
            error = "none"
        except (ValueError, RuntimeError, AssertionError) as e:
            error = f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"
        kind = "None" if ids is None else f"{len(ids)} device(s)"
        yield rank.record("device_ids_refused", "1", float(error != "none"), device_ids=kind, error=error)


def random_labels(config: Config, rank: Rank) -> Iterator[Record]:
    """The article's loop: random inputs, random labels. Its loss cannot fall below ln 10."""
    ddp = _article_model(rank)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    losses = [_article_step(ddp, optimizer, config, rank) for _ in range(20 if config.smoke else config.steps)]
    yield rank.record("random_label_loss", "nats", losses)
    yield rank.record("random_label_floor", "nats", math.log(10), kind="modelled")


def slow_rank(config: Config, rank: Rank) -> Iterator[Record]:
    """The last rank sleeps in every step: how long are everyone's steps, and do the replicas stay equal?"""
    for sleep_s in (0.0, config.slow_ms / 1e3):
        ddp = _article_model(rank)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
        asleep = sleep_s if rank.rank == rank.world_size - 1 else 0.0
        step = _delayed(lambda d=ddp, o=optimizer: _article_step(d, o, config, rank), asleep)
        measure.time_steps(step, 3, rank.device)
        seconds = measure.time_steps(step, 4 if config.smoke else 12, rank.device)
        fastest = rank.gather(sorted(seconds)[len(seconds) // 2])
        yield rank.record("step_s_of_fastest_rank", "s", min(fastest), slow_ms=1e3 * sleep_s)
        yield rank.record("parameter_spread", "1", parameter_spread(ddp.module, rank), when=f"slow {sleep_s:g}")


def _delayed(step: Callable[[], object], sleep_s: float) -> Callable[[], None]:
    def delayed() -> None:
        time.sleep(sleep_s)
        step()

    return delayed


def bucket_memory(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes of gradient storage beyond the gradients themselves, with and without bucket views."""
    for view in (False, True):
        ddp = DistributedDataParallel(models.mlp().module.to(rank.device), gradient_as_bucket_view=view)
        _article_step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), config, rank)
        grads = [p.grad for p in ddp.parameters()]
        shared = len({g.untyped_storage().data_ptr() for g in grads}) < len(grads)
        # Gradients that own their storage are copied into buckets of the same total size, which stay allocated.
        extra = 0 if shared else nbytes(*grads)
        yield rank.record("bucket_bytes", "B", extra, gradient_as_bucket_view=view)


def relu_floor(config: Config, rank: Rank) -> Iterator[Record]:
    """Best mean squared error of a non-negative output on standard normal labels: E[min(y, 0)^2]."""
    labels = torch.randn(200_000)
    yield rank.record("relu_mse", "1", labels.clamp(max=0).square().mean().item(), output="the best possible, >= 0")
    yield rank.record("relu_mse", "1", labels.square().mean().item(), output="always 0")


def _article_model(rank: Rank) -> DistributedDataParallel:
    return DistributedDataParallel(models.mlp().module.to(rank.device))


def _article_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, config: Config, rank: Rank) -> float:
    """One turn of the article's loop; returns this rank's own loss."""
    x = torch.randn(config.batch_size, 1024, device=rank.device)
    y: Tensor = torch.randint(10, (config.batch_size,), device=rank.device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    cli.main()
