"""Small DDP trainings in which one planted line lets the replicas drift apart, or only looks as if it did."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labs.data import fashion

BATCH = 32  # images per rank and step
LR = 1e-3
HIDDEN = 64


@dataclass(frozen=True)
class Fault:
    """A line that is wrong, or only looks so, and in which tensors the ranks then differ."""

    name: str
    differ: tuple[str, ...] = ()
    """Of "parameters", "buffers" and "optimizer": those that differ between ranks; none if it is harmless."""
    what: str = ""
    may: tuple[str, ...] = ()
    """Those that differ on some processors, early or late, for good or not: their kernels decide how they round."""


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none", what="nothing is planted"),
        Fault("dropout", what="each rank draws other dropout masks: gradients differ, their average does not"),
        Fault(
            "other rounding",
            what="one rank sums its batch in another order: gradients differ by rounding before they are averaged",
        ),
        Fault(
            "batch norm",
            ("buffers",),
            "running statistics are those of each rank's own batch, by design; DDP sends "
            "rank 0's before the next forward",
        ),
        Fault(
            "batch norm, not sent",
            ("buffers",),
            "forward_sync_buffers=False: running statistics go their own ways, by design, and so does evaluation",
        ),
        Fault("other weights", ("parameters",), "one rank loads other weights after DDP was made"),
        Fault("in place", ("parameters",), "one rank changes a parameter in place"),
        Fault(
            "added later",
            ("parameters", "optimizer"),
            "a layer that was added after DDP was made: nobody averages its gradient",
        ),
        Fault("optimizer state", ("parameters", "optimizer"), "one rank goes on without the optimizer's state"),
        Fault(
            "no_sync", ("parameters", "optimizer"), "one optimizer step under no_sync: each rank takes its own gradient"
        ),
        Fault("skipped step", ("parameters", "optimizer"), "one rank skips a step by itself"),
        Fault(
            "other kernel",
            (),
            "one rank's optimizer computes in another order of rounding: fused on one, not on the other",
            may=("parameters", "optimizer"),
        ),
        Fault("never averaged", ("parameters", "optimizer"), "no_sync in every step from one on"),
    )
}


def build(fault: str, seed: int, width: int = HIDDEN) -> nn.Module:
    """A perceptron with one hidden layer, the same on all ranks."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(196, width)]
    if fault.startswith("batch norm"):
        layers.append(nn.BatchNorm1d(width))
    layers.append(nn.ReLU())
    if fault == "dropout":
        layers.append(nn.Dropout(0.2))
    return nn.Sequential(*layers, nn.Linear(width, 10))


@functools.cache
def data(device: torch.device) -> tuple[Tensor, ...]:
    """Images and labels for training, then for testing."""
    return fashion.vectors(10_000, device)


class Replica:
    """This rank's part of a DDP training in which `fault` is planted in step `at`, counted from 0, on `bad_rank`."""

    def __init__(
        self, fault: str, seed: int, device: torch.device, at: int = 0, bad_rank: int = 1, width: int = HIDDEN
    ) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        self.fault, self.seed, self.at, self.bad = fault, seed, at, self.rank == bad_rank
        self.model = build(fault, seed, width).to(device)
        own_buffers = {"forward_sync_buffers": False} if fault == "batch norm, not sent" else {}
        self.ddp = DistributedDataParallel(self.model, **own_buffers)
        fused = fault == "other kernel" and self.bad
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=fused, foreach=not fused)
        self.batches = self._batches()
        self.done = 0
        if fault == "dropout":
            torch.manual_seed(1000 * seed + self.rank)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of each global batch, for ever."""
        x, y, *_ = data(self.device)
        draw, many = torch.Generator().manual_seed(self.seed), BATCH * self.ranks
        while True:
            for chosen in torch.randperm(len(x), generator=draw)[: len(x) // many * many].split(many):
                own = chosen[self.rank :: self.ranks].to(self.device)
                yield x[own], y[own]

    def step(self) -> float:
        """One step; returns this rank's loss in nats."""
        now = self.done == self.at
        if now:
            self._plant()
        x, y = next(self.batches)
        if self.fault == "other rounding" and self.bad:
            x, y = x.flip(0), y.flip(0)  # the same samples, the other way round
        since = self.fault == "never averaged" and self.done >= self.at
        local = since or (self.fault == "no_sync" and now)
        self.optimizer.zero_grad()
        with self.ddp.no_sync() if local else nullcontext():
            loss = cross_entropy(self.ddp(x), y)
            loss.backward()
        if not (self.fault == "skipped step" and now and self.bad):
            self.optimizer.step()
        self.done += 1
        return loss.item()

    def _plant(self) -> None:
        if self.fault == "other weights" and self.bad:
            self.model.load_state_dict(build(self.fault, self.seed + 1).state_dict())
        if self.fault == "in place" and self.bad:
            with torch.no_grad():
                self.model[-1].weight[0, 0] += 1e-3
        if self.fault == "optimizer state" and self.bad:
            self.optimizer.state.clear()
        if self.fault == "added later":  # on all ranks, with the same weights
            torch.manual_seed(self.seed)
            self.model.append(nn.Linear(10, 10).to(self.device))
            self.optimizer.add_param_group({"params": self.model[-1].parameters()})

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Named "parameters", "buffers", or the state of the "optimizer"."""
        if kind == "optimizer":
            named = {p: name for name, p in self.model.named_parameters()}
            return {
                f"{key} of {named[p]}": v
                for p, state in self.optimizer.state.items()
                for key, v in state.items()
                if key != "step"
            }
        return dict(self.model.named_parameters() if kind == "parameters" else self.model.named_buffers())

    @torch.no_grad()
    def judged(self) -> tuple[float, float]:
        """(accuracy, loss in nats) of this rank's own replica on the 2,000 test images."""
        *_, x, y = data(self.device)
        self.model.eval()
        scores = self.model(x)
        self.model.train()
        return (scores.argmax(1) == y).float().mean().item(), cross_entropy(scores, y).item()


def really_differ(tensors: dict[Any, Tensor]) -> set:
    """Names of tensors of which any byte differs from rank 0's on any rank, by sending them all. A collective."""
    parts = [t.detach().contiguous().flatten().view(torch.uint8) for t in tensors.values()]
    own = torch.cat(parts)
    of_rank_0 = own.clone()
    dist.broadcast(of_rank_0, 0)
    other = (own != of_rank_0).split([len(part) for part in parts])
    differ = torch.stack([part.any() for part in other]).int()
    dist.all_reduce(differ)
    return {name for name, ranks in zip(tensors, differ.tolist(), strict=True) if ranks}


def draw(fault: str, seed: int, ranks: int, steps: int) -> tuple[int, int]:
    """(step, rank) of a fault; the same for the same fault and seed, on every machine."""
    dice = random.Random(f"{fault} {seed}")
    return 0 if fault == "other kernel" else dice.randrange(2, steps // 2), dice.randrange(ranks)
