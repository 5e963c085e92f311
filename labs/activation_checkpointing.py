"""What does recomputing activations save, and what does it cost?

    python -m labs.activation_checkpointing
    python -m labs.activation_checkpointing --model my_package.my_module:factory --policies none block selective

About 6 s on 2 CPU cores. Trains a stack of 24 residual blocks in three ways: without recomputation, in segments that
backward recomputes, and with selective recomputation, which keeps the results of matrix products. The policies take
turns. Peak memory comes from the device's allocator, the bytes that forward keeps from autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from labs.common import models
from labs.common.activation_memory.allocator import watch
from labs.common.data.fashion import vectors
from labs.common.memory.recomputation import recompute, segments
from labs.common.models import Workload
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

MODEL = "deep_mlp"
CLAIMED = 1.2  # step time with recomputation over without, according to an article that this course tests
SMOKE = {"policies": ("none", "segments:24"), "batch": 32, "rounds": 2}


@dataclass(frozen=True)
class Config:
    """Which model to train, and how to recompute its activations."""

    policies: tuple[str, ...] = (
        "none", "segments:1", "segments:4", "segments:8", "segments:24", "selective",
    )  # fmt: skip
    """Recomputation policies (labs.common.memory.recomputation); the first must be none."""
    model: str = MODEL
    """deep_mlp, one of labs.models.MODELS, or package.module:factory."""
    batch: Annotated[int, Ge(1)] = 256
    """Samples per step."""
    rounds: Annotated[int, Ge(2)] = 12
    """Number of rounds; each policy takes one turn per round."""
    seed: int = 0
    """Seed of the model, the data and dropout."""
    smoke: bool = False
    """Run two policies for two rounds."""

    def __post_init__(self) -> None:
        require(
            self.policies[:1] == ("none",) and len(self.policies) > 1, "policies must begin with none and name more"
        )
        models.require_known(self.model, besides=(MODEL,))


class ResidualBlock(nn.Module):
    """A transformer's MLP block: normalise, widen four times, project back, apply dropout, add to the input."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to (batch, width)."""
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def deep_mlp(layers: int = 24, width: int = 96) -> Workload:
    """Build `layers` residual blocks with dropout 0.1 for Fashion-MNIST; an input is an image of 196 numbers."""
    blocks = nn.Sequential(*(ResidualBlock(width, 0.1) for _ in range(layers)))
    x, y, _, _ = vectors(8192, torch.device("cpu"))

    def make_batch(rows: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(x), (rows,))
        return x[drawn], y[drawn]

    module = nn.Sequential(nn.Linear(196, width), blocks, nn.Linear(width, 10))
    return Workload(module, make_batch, functional.cross_entropy)


def build(config: Config) -> Workload:
    """Build the workload, without any recomputation policy yet."""
    torch.manual_seed(config.seed)
    return deep_mlp() if config.model == MODEL else models.build(config.model, config.seed)


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if a policy doesn't fit the model."""
    module = build(config).module
    for policy in config.policies:
        segments(module, policy)


class Step:
    """A training step under one policy. All steps of a model share its parameters, optimizer and batch."""

    def __init__(self, workload: Workload, policy: str, optimizer: torch.optim.Optimizer, batch: tuple) -> None:
        module = workload.module
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.module = recompute(copy.deepcopy(module, shared), policy)
        self.loss, self.optimizer, (self.x, self.y) = workload.loss, optimizer, batch

    def forward(self) -> Tensor:
        """Return the loss."""
        return self.loss(self.module(self.x), self.y)

    def finish(self, loss: Tensor) -> None:
        """Run backward, which may recompute activations, and the optimizer step."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, seed: int) -> list[Tensor]:
        """Return the gradients of the batch, with dropout seeded by `seed`."""
        torch.manual_seed(seed)
        self.forward().backward()
        found = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return found

    def __call__(self) -> None:
        """Run one training step."""
        self.finish(self.forward())


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield peak memory, saved bytes, gradient differences and FLOPs of each policy, then interleaved step times."""
    workload = build(config)
    module = workload.module.to(rank.device)
    batch = tuple(t.to(rank.device) for t in workload.make_batch(config.batch))
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    steps = {policy: Step(workload, policy, optimizer, batch) for policy in config.policies}
    steps["none"]()  # creates the optimizer's state
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    fixed = sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *batch, *state))
    for policy, step in steps.items():
        case = {"part": "pareto", "model": config.model, "policy": policy}
        live = watch(step.forward, step.finish, rank.device)
        yield rank.record("peak_bytes", "B", fixed + live.peak, **case)
        yield rank.record("saved_bytes", "B", live.after_forward, **case)
    reference = steps["none"].gradients(config.seed)
    largest = max(float(g.abs().max()) for g in reference)
    for policy, step in steps.items():
        case = {"part": "pareto", "model": config.model, "policy": policy}
        with FlopCounterMode(display=False) as counter:
            gradients = step.gradients(config.seed)
        off = max(float((a - b).abs().max()) for a, b in zip(reference, gradients, strict=True))
        yield rank.record("flops", "FLOP", counter.get_total_flops(), **case)
        yield rank.record("gradient_difference", "x", off / largest, **case)  # relative to the largest gradient
    seconds = measure.interleave(
        steps,
        config.rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    for policy, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), part="pareto", model=config.model, policy=policy)


def price(records: Records, policy: str) -> measure.Estimate:
    """Return the step time with this policy over the time without recomputation, paired by round."""
    step_s = {r.case["policy"]: r.samples for r in records.where("step_s", part="pareto")}
    return measure.paired_ratio(step_s[policy], step_s["none"])


def finest(records: Records) -> str:
    """Return the policy that recomputes each block separately."""
    return [
        r.case["policy"]
        for r in records.where("step_s", part="pareto")
        if r.case["policy"].startswith(("segments", "block"))
    ][-1]


def category(records: Records) -> str:
    """Compare the cost of recomputing each block with the article's 20 %: "more", "less" or "inconclusive"."""
    ratio = price(records, finest(records))
    return "more" if ratio.low > CLAIMED else "less" if ratio.high < CLAIMED else "inconclusive"


def answer(records: Records) -> Iterator[str]:
    """Yield each policy's peak memory and relative step time."""
    none = records.one("peak_bytes", policy="none").value
    yield f"A step of {records[0].config['model']} takes {none / 1e6:.1f} MB at its peak if nothing is recomputed."
    for r in records.where("peak_bytes"):
        if (policy := r.case["policy"]) != "none":
            yield f"{policy}: {r.value / 1e6:.1f} MB, and {price(records, policy)} the time."
    worst = max(r.value for r in records.where("gradient_difference"))
    yield f"Gradients differ by at most {worst:.1g} of the largest one."


if __name__ == "__main__":
    cli.main()
