"""What does each common DDP bug look like from outside?

    python -m labs.ddp_bugs      |      torchrun --nproc-per-node 2 -m labs.ddp_bugs --cases right bypassed

About 3 s on 2 CPU cores. Each case trains the same small CNN on the same Fashion-MNIST images, with two micro-batches
per optimizer step. No bug raises an error, but five counts, taken without reading the code, reveal them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from annotated_types import Ge, Interval
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from labs.common.data_parallel.gradient_buckets import counting_all_reduce
from labs.common.models import ConvNet, fashion_batch
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Case = Literal["right", "no sampler", "no set_epoch", "bypassed", "seed per rank", "forward outside no_sync"]
MICRO_BATCHES, EPOCHS = 2, 2
AGREE = 1e-6
"""Weights that differ by at most this much between ranks count as equal."""


@dataclass(frozen=True)
class Config:
    """How much to train, and which cases."""

    cases: tuple[Case, ...] = Case.__args__
    """Cases to train: "right" is correct, each of the others contains one bug."""
    images: Annotated[int, Interval(ge=64, le=10_000)] = 512
    """Images of the training set."""
    batch_size: Annotated[int, Ge(1)] = 16
    """Images per rank and micro-batch."""
    smoke: bool = False
    """Has no effect: the run is short anyway."""


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the images don't fill whole steps on every rank."""
    step = config.batch_size * MICRO_BATCHES * world_size
    require(config.images % step == 0, f"images must be a multiple of {step} (a step's images), not {config.images}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the counts for each case."""
    torch.manual_seed(0)
    images, labels = fashion_batch(config.images)
    for done, case in enumerate(config.cases, start=1):
        seen, sent, model = train(case, images, labels, config, rank)
        for sign, value in signs(seen, sent, model, config, rank).items():
            yield rank.record("count", "1", value, case=case, sign=sign)
        rank.progress(done, len(config.cases), case)


def train(
    case: Case, images: Tensor, labels: Tensor, config: Config, rank: Rank
) -> tuple[list[list[int]], Counter[str], nn.Module]:
    """Train; return the images read in each epoch, the bytes passed to all-reduces, and the model.

    Every bug is on the lines that name its case.
    """
    torch.manual_seed(0)
    ddp = DistributedDataParallel(ConvNet(channels=1, width=8).to(rank.device))
    sent: Counter[str] = Counter()
    ddp.register_comm_hook(sent, counting_all_reduce)
    data = TensorDataset(images, labels, torch.arange(len(images)))
    sampler = DistributedSampler(data, seed=rank.rank if case == "seed per rank" else 0)
    shuffle = torch.Generator().manual_seed(0)
    if case == "no sampler":
        loader = DataLoader(data, config.batch_size, shuffle=True, generator=shuffle)
    else:
        loader = DataLoader(data, config.batch_size, sampler=sampler)
    model = ddp.module if case == "bypassed" else ddp
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen: list[list[int]] = []
    for epoch in range(EPOCHS):
        if case != "no set_epoch":
            sampler.set_epoch(epoch)
        seen.append([])
        for i, (x, y, numbers) in enumerate(loader):
            seen[-1] += numbers.tolist()
            last = i % MICRO_BATCHES == MICRO_BATCHES - 1
            with nullcontext() if last or case == "forward outside no_sync" else ddp.no_sync():
                loss = cross_entropy(model(x.to(rank.device)), y.to(rank.device)) / MICRO_BATCHES
                if case != "forward outside no_sync":
                    loss.backward()
            if case == "forward outside no_sync":
                with nullcontext() if last else ddp.no_sync():  # too late: DDP checks during forward
                    loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return seen, sent, ddp.module


def signs(seen: list[list[int]], sent: Counter[str], model: nn.Module, config: Config, rank: Rank) -> dict[str, float]:
    """Return the counts visible from outside, by name; the same on all ranks."""
    epochs = [[i for part in rank.gather(own) for i in part] for own in seen]
    steps = len(seen[0]) // (config.batch_size * MICRO_BATCHES)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    of_rank_0 = weights.clone()
    dist.broadcast(of_rank_0, src=0)
    apart = rank.slowest([(weights - of_rank_0).abs().max().item()])[0]
    size = nn.utils.parameters_to_vector(model.parameters()).nbytes
    return {
        "steps per epoch": steps,
        "different images per epoch": len(set(epochs[0])),
        "next epoch has the same order": float(epochs[0] == epochs[1]),
        "ranks' weights agree": float(apart < AGREE),
        "gradients exchanged per step": sent["bytes"] / size / (EPOCHS * steps),
    }


def answer(records: Records) -> Iterator[str]:
    """Yield how each case differs from the right one."""
    found: dict[str, dict[str, float]] = {}
    for r in records.where("count"):
        found.setdefault(r.case["case"], {})[r.case["sign"]] = r.value
    right = found.get("right", {})
    for case, values in found.items():
        odd = [f"{sign}: {value:g}, not {right[sign]:g}" for sign, value in values.items() if value != right.get(sign)]
        if right and case != "right":
            yield f"{case}: {'; '.join(odd) or 'no sign differs'}."


if __name__ == "__main__":
    cli.main()
