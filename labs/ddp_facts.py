"""Which statements about DDP survive a try?

    python -m labs.ddp_facts
    torchrun --nproc-per-node 2 -m labs.ddp_facts

About 7 s on 2 CPU cores. One small experiment for each statement that the articles make or imply; notebook 03
turns the records into verdicts.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from labs.ddp_training import parameter_spread
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts import models
from labs.parts.data_parallel.replicas import nbytes
from labs.parts.data_parallel.sync_buffers import SYNC_BUFFERS
from labs.parts.memory.activation_bytes import activation_bytes


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
        learnable_labels,
        slow_rank,
        buffers,
        printed_loss,
        memory_parts,
        module_level,
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


def learnable_labels(config: Config, rank: Rank) -> Iterator[Record]:
    """The article's model on labels that follow a rule: does its loss fall?"""
    workload = models.mlp()
    ddp = DistributedDataParallel(workload.module.to(rank.device))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    losses = []
    for _ in range(20 if config.smoke else 50):
        x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
        optimizer.zero_grad()
        loss = workload.loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    yield rank.record("learnable_loss", "nats", losses)


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


class _Collectives(TorchDispatchMode):
    """Counts the collective calls that reach torch within, DDP's own among them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))


def buffers(config: Config, rank: Rank) -> Iterator[Record]:
    """Broadcasts in a training step of a model with buffers, without, and with their broadcast switched off.

    Running statistics of BatchNorm are buffers. By default DDP sends rank 0's before every forward in training mode,
    one broadcast for each type of number.
    """
    for name, sync in (("cnn_batchnorm", True), ("cnn_batchnorm", False), ("cnn", True)):
        workload = models.build(name)
        ddp = DistributedDataParallel(workload.module.to(rank.device), **{SYNC_BUFFERS: sync})
        x, y = (t.to(rank.device) for t in workload.make_batch(8))
        for _ in range(2):  # DDP agrees on its buckets, which is a broadcast, too
            workload.loss(ddp(x), y).backward()
        steps = 3
        with _Collectives() as seen:
            for _ in range(steps):
                workload.loss(ddp(x), y).backward()
        case = {"model": name, "sync_buffers": sync, "buffer_bytes": nbytes(*workload.module.buffers())}
        yield rank.record("broadcasts_per_step", "1", seen.calls["c10d::broadcast_"] / steps, **case)
        yield rank.record("all_reduces_per_step", "1", seen.calls["c10d::allreduce_"] / steps, **case)


def printed_loss(config: Config, rank: Rank) -> Iterator[Record]:
    """Step time of the article's loop with and without loss.item(), which waits for the device, in turn."""
    ddp = _article_model(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    steps = {read: partial(_article_step, ddp, optimizer, config, rank, read) for read in (True, False)}
    for step in steps.values():
        measure.time_steps(step, 3, rank.device)
    rounds = 2 if config.smoke else 12
    seconds = measure.interleave(steps, rounds, rank.device, inner=2, between=rank.barrier)
    for read, samples in seconds.items():
        yield rank.record("step_s_by_item", "s", rank.slowest(samples), item=read)


def memory_parts(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes that a rank holds for one training step, by part, with DDP's buckets as a part or as views of gradients."""
    for view, kind in ((False, torch.optim.Adam), (True, torch.optim.SGD)):  # the most parts, and the fewest
        module = models.mlp().module.to(rank.device)
        ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
        held: list[Tensor] = []  # the buckets of the second step: the first goes in one, while DDP learns the order
        ddp.register_comm_hook(held, _noted)
        optimizer = kind(ddp.parameters(), lr=0.0)
        for _ in range(2):
            held.clear()
            _article_step(ddp, optimizer, config, rank)
        grads = [p.grad for p in ddp.parameters()]
        own = {g.untyped_storage().data_ptr() for g in grads}
        state = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]  # not the step numbers
        batch = (torch.randn(config.batch_size, 1024, device=rank.device), _labels(config, rank))
        parts = {
            "parameters": nbytes(*module.parameters()),
            "gradients": nbytes(*grads),
            "buckets": nbytes(*(b for b in held if b.untyped_storage().data_ptr() not in own)),
            "optimizer": nbytes(*state),
            "activations": activation_bytes(models.Workload(module, None, nn.functional.cross_entropy), *batch),
        }
        for part, size in parts.items():
            case = {"part": part, "gradient_as_bucket_view": view, "optimizer": kind.__name__}
            yield rank.record("held_bytes", "B", size, **case)


def _noted(held: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    held.append(bucket.buffer())
    return default_hooks.allreduce_hook(None, bucket)


MODULE_LEVEL = """
import multiprocessing
import os

os.write(1, b"%d " % os.getpid())  # in its place the article builds a model and moves it to GPU 0

def worker():
    pass

if __name__ == "__main__":
    processes = [multiprocessing.get_context("spawn").Process(target=worker) for _ in range({workers})]
    for p in processes:
        p.start()
    for p in processes:
        p.join()
"""


def module_level(config: Config, rank: Rank) -> Iterator[Record]:
    """In how many processes does a line at module level run when a program spawns workers? torch's spawn does that."""
    ran = None
    if rank.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "program.py")
            script.write_text(MODULE_LEVEL.format(workers=rank.world_size), encoding="utf-8")
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
        ran = len(set(done.stdout.split()))
    yield rank.record("module_level_runs", "processes", rank.gather(ran)[0], workers=rank.world_size)


def relu_floor(config: Config, rank: Rank) -> Iterator[Record]:
    """Best mean squared error of a non-negative output on standard normal labels: E[min(y, 0)^2]."""
    labels = torch.randn(200_000)
    yield rank.record("relu_mse", "1", labels.clamp(max=0).square().mean().item(), output="the best possible, >= 0")
    yield rank.record("relu_mse", "1", labels.square().mean().item(), output="always 0")


def _article_model(rank: Rank) -> DistributedDataParallel:
    return DistributedDataParallel(models.mlp().module.to(rank.device))


def _article_step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, config: Config, rank: Rank, read: bool = True
) -> float | None:
    """One turn of the article's loop; returns this rank's own loss, if it is to be read."""
    x = torch.randn(config.batch_size, 1024, device=rank.device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(x), _labels(config, rank))
    loss.backward()
    optimizer.step()
    return loss.item() if read else None


def _labels(config: Config, rank: Rank) -> Tensor:
    return torch.randint(10, (config.batch_size,), device=rank.device)


def answer(run: Records) -> Iterator[str]:
    """What was found of DDP, in sentences."""
    apart = {r.case["when"]: r.value for r in run.where("parameter_spread")}
    sent = {(r.case["model"], r.case["sync_buffers"]): r.value for r in run.where("broadcasts_per_step")}
    yield (
        f"Parameters: the ranks differ by up to {apart['before DDP']:.2g} before DDP, by {apart['after DDP']:g} after "
        f"its constructor, by {apart['after 5 steps']:g} after five steps."
    )
    yield (
        f"Buffers: {sent['cnn_batchnorm', True]:g} broadcasts in a step of a model with BatchNorm, "
        f"{sent['cnn_batchnorm', False]:g} with {SYNC_BUFFERS}=False, {sent['cnn', True]:g} without buffers."
    )
    even, slow = run.where("step_s_of_fastest_rank")
    if run[0].layout["world_size"] > 1:
        yield (
            f"A rank that is {slow.case['slow_ms']:g} ms slower: the fastest rank's step takes "
            f"{1e3 * slow.value:.1f} ms in place of {1e3 * even.value:.1f}."
        )
    parts = {r.case["part"]: r.value for r in run.where("held_bytes", gradient_as_bucket_view=False)}
    yield (
        "Memory of a rank with Adam (MB): "
        + ", ".join(f"{part} {size / 1e6:.2f}" for part, size in parts.items())
        + "."
    )


if __name__ == "__main__":
    cli.main()
